"""`rotary_write` on Hopper with a Mosaic GPU kernel: limits and the call. The kernel is in mosaic_block.py."""

from functools import partial

import jax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.rotary_write.mosaic_block import Geometry, Kernel


def why_not(
    pages: tuple[ArrayOrStruct, ...],
    qkv: ArrayOrStruct,
    cos: ArrayOrStruct,
    sin: ArrayOrStruct,
    slots: ArrayOrStruct,
    *,
    norm: ArrayOrStruct | None = None,
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    del sin, slots, norm  # Their shapes follow from the others'.
    return why_not_mosaic() or Geometry.of(pages, qkv, cos).refusal()


def rotary_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    qkv: Float[Array, "tokens all_heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    slots: Int[Array, " tokens"],
    *,
    norm: Float[Array, "2 head_dim"] | None = None,
    norm_eps: float = 1e-6,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Implements `api.rotary_write`; negative slots write nothing, too.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = Geometry.of(pages, qkv, cos)
    check_kernel(geometry.refusal())
    if qkv.shape[0] == 0:
        return qkv[:, : geometry.heads], pages
    options = {"norm_eps": norm_eps, "blocks": geometry.blocks, "interpret": interpret}
    return write(pages, qkv, cos, sin, slots, norm, **options)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("norm_eps", "blocks", "interpret"))
def write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    qkv: Float[Array, "tokens all_heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    slots: Int[Array, " tokens"],
    norm: Float[Array, "2 head_dim"] | None,
    *,
    norm_eps: float,
    blocks: int,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Runs the kernel with `blocks` blocks per token."""
    geometry = Geometry.of(pages, qkv, cos)
    refs = [jax.new_ref(pool) for pool in pages]
    kernel = Kernel(geometry, blocks, None if norm is None else norm_eps)
    weights = [] if norm is None else [norm]
    q = kernel.build(qkv.shape[0], interpret)(qkv, cos, sin, slots, *weights, *refs)
    return q, tuple(jax.freeze(ref) for ref in refs)
