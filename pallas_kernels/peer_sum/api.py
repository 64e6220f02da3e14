"""`peer_sum`: the sum of an array over the GPUs of one process, each of which gets it, in one kernel of a CUDA graph.

XLA sums small arrays in a kernel over peer memory too. But it gives each sum of each program memory of its own, and
sets the sum's node in every GPU's graph anew before each launch. Here all sums of all programs share one mailbox per
GPU, whose address is data, and count themselves on the device.
"""

import jax
from jaxtyping import Array, Float32, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
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
    "peer_sum_weighed",
    "peers_shape",
    "why_not",
    "why_not_mailboxes",
]


def peer_sum(
    part: Shaped[Array, "rows width"],
    peers: Int[Array, "1 numbers"],
    *,
    residual: Shaped[Array, "rows width"] | None = None,
) -> Shaped[Array, "rows width"]:
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
        residual: an array of the same dtype that all devices have. It is added after the parts, before the rounding;
            `None` for nothing.

    Raises:
        ValueError: the kernel does not support the shape, dtype or device, see `why_not`.
    """
    _check_residual(part, residual)
    check_kernel(why_not(part))
    return mosaic_gpu.peer_sum(part, peers, residual)[0]


def peer_sum_weighed(
    part: Shaped[Array, "rows width"],
    peers: Int[Array, "1 numbers"],
    *,
    residual: Shaped[Array, "rows width"],
    norms: Shaped[Array, "norms width"],
    norm_row: int,
) -> tuple[Shaped[Array, "rows width"], Shaped[Array, "rows width"], Float32[Array, "parts rows"]]:
    """Returns `peer_sum`, its product with the weight of an RMSNorm, and sums of its squares over parts of its columns.

    The norm lacks its division then, which `skinny_matmul` does: give it the product as `x`, and the sums as `squares`.

    Args:
        part: as for `peer_sum`; its rows are multiples of 256 bytes.
        peers: as for `peer_sum`.
        residual: as for `peer_sum`.
        norms: weights of norms, of the same dtype.
        norm_row: the row of `norms` that is the weight of this norm.

    Raises:
        ValueError: the kernel does not support the shape, dtype or device, see `why_not`.
    """
    _check_residual(part, residual)
    if (norms.dtype, norms.shape[1]) != (part.dtype, part.shape[1]) or norm_row >= len(norms):
        raise ValueError(
            f"norms must have a row {norm_row} of {part.shape[1]} numbers of {part.dtype}, got "
            f"{norms.dtype}{list(norms.shape)}"
        )
    check_kernel(why_not(part, weighs=True))
    out, weighed, squares = mosaic_gpu.peer_sum(part, peers, residual, norms, norm_row=norm_row)
    return out, weighed, squares


def why_not(part: Shaped[ArrayOrStruct, "rows width"], *, weighs: bool = False) -> str | None:
    """Returns why the kernel cannot sum an array, or `None` if it can; reads its shape and dtype only.

    Args:
        part: the array `[rows, width]`, or its type.
        weighs: whether `peer_sum_weighed` gets it.
    """
    return why_not_mosaic() or mosaic_gpu.refusal(part, weighs=weighs)


def _check_residual(part: jax.Array, residual: jax.Array | None) -> None:
    if residual is not None and (residual.dtype, residual.shape) != (part.dtype, part.shape):
        raise ValueError(
            f"residual must be {part.dtype}{list(part.shape)} like the part, got "
            f"{residual.dtype}{list(residual.shape)}"
        )
