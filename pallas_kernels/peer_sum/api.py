"""`peer_sum`: the sum of an array over the GPUs of one process, each of which gets it, in one kernel of a CUDA graph.

XLA sums small arrays in a kernel over peer memory too. But it gives each sum of each program memory of its own, and
sets the sum's node in every GPU's graph anew before each launch. Here all sums of all programs share one mailbox per
GPU, whose address is data, and count themselves on the device.
"""

from jaxtyping import Array, Int, Shaped

from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.peer_sum import mosaic_gpu
from pallas_kernels.peer_sum.mailboxes import (
    MOST_BYTES,
    Mailboxes,
    mailbox_bytes,
    make_mailboxes,
    peers_shape,
    why_not_mailboxes,
)

__all__ = [
    "MOST_BYTES",
    "Mailboxes",
    "mailbox_bytes",
    "make_mailboxes",
    "peer_sum",
    "peers_shape",
    "why_not",
    "why_not_mailboxes",
]


def peer_sum(
    part: Shaped[Array, "rows width"],
    peers: Int[Array, "1 numbers"],
    *,
    residual: Shaped[Array, "rows width"] | None = None,
    norms: Shaped[Array, "norms width"] | None = None,
    norm_row: int = 0,
) -> Array | tuple[Array, Array, Array]:
    """Returns the sum of a float array over devices, with the same bits on each.

    Every device must call it for arrays of the same shapes in the same order, and no sum of a program may run beside
    another one: each needs the result of the one before, as the layers of a model do. The parts are added in the order
    of the devices, in float32, and rounded once.

    If another device does not send its part within a minute, the kernel ends with an error, after which CUDA accepts no
    more work of the process.

    Args:
        part: this device's part, under `jax.shard_map`: bfloat16, float16 or float32, of at most `MOST_BYTES`, a
            multiple of 8.
        peers: this device's row of `Mailboxes.peers`.
        residual: an array that all devices have, of the same dtype, which is added after the parts and before the
            rounding; `None` for nothing.
        norms: weights of RMSNorms, of the same dtype; `None` to return the sum alone.
        norm_row: the row of `norms` that is the weight of the norm after the sum.

    Returns:
        The sum. With `norms`, also the rounded sum times the norm's weight, and float32 sums `[parts, rows]` of the
        rounded sum's squares: what `skinny_matmul` takes as `x` and `squares`.

    Raises:
        ValueError: the kernel does not support the shape, dtype or device, see `why_not`.
    """
    for name, given in (("residual", residual), ("norms", norms)):
        if given is not None and (given.dtype, given.shape[1]) != (part.dtype, part.shape[1]):
            raise ValueError(
                f"{name} must have rows of {part.shape[1]} numbers of {part.dtype}, like the part, got "
                f"{given.dtype}{list(given.shape)}"
            )
    check_kernel(why_not(part, weighs=norms is not None))
    found = mosaic_gpu.peer_sum(part, peers, residual, norms, norm_row=norm_row)
    return found[0] if norms is None else (found[0], found[1], found[2])


def why_not(part: Shaped[Array, "rows width"], *, weighs: bool = False) -> str | None:
    """Returns why the kernel cannot sum an array, or `None` if it can; reads its shape and dtype only.

    Args:
        part: the array, or its type.
        weighs: whether `peer_sum` would get `norms`.
    """
    return why_not_mosaic() or mosaic_gpu.refusal(part, weighs=weighs)
