"""`rotary_write` on Hopper with a Mosaic GPU kernel: limits and the call. The kernel is in mosaic_block.py."""

from functools import partial

import jax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.rotary_write.arguments import RotaryArrays
from pallas_kernels.rotary_write.mosaic_block import Geometry, Kernel


def why_not(arrays: RotaryArrays) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can; reads shapes and dtypes only."""
    return why_not_mosaic() or _geometry(arrays).refusal()


def _geometry(arrays: RotaryArrays) -> Geometry:
    return Geometry.of(arrays.pages, arrays.qkv, arrays.cos)


def rotary_write(
    arrays: RotaryArrays,
    *,
    norm_eps: float = 1e-6,
    value_norm: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Implements `api.rotary_write`; negative slots write nothing, too.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = _geometry(arrays)
    check_kernel(geometry.refusal())
    if arrays.qkv.shape[0] == 0:
        return arrays.qkv[:, : geometry.heads], arrays.pages
    return write(
        arrays,
        norm_eps=norm_eps,
        value_norm=value_norm,
        blocks=geometry.blocks,
        interpret=interpret,
    )


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("norm_eps", "value_norm", "blocks", "interpret"))
def write(
    arrays: RotaryArrays,
    *,
    norm_eps: float,
    blocks: int,
    value_norm: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Runs the kernel with `blocks` blocks per token."""
    pages, qkv, cos, sin, slots, norm = arrays
    refs = [jax.new_ref(pool) for pool in pages]
    normalised = ("" if norm is None else "qk") + "v" * value_norm
    kernel = Kernel(_geometry(arrays), blocks, normalised, norm_eps)
    weights = [] if norm is None else [norm]
    q = kernel.build(qkv.shape[0], interpret)(qkv, cos, sin, slots, *weights, *refs)
    return q, tuple(jax.freeze(ref) for ref in refs)
