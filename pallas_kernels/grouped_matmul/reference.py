"""Reference of `grouped_matmul`: each row times its group's matrix, in float32."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats.few_bits import FewBits


def grouped_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> Float[Array, "rows out"]:
    """Implements `api.grouped_matmul`, rounded once, at the end."""
    ends = jnp.cumsum(group_sizes)
    groups = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")
    if isinstance(weight, FewBits):
        if weight.order is not None:
            orders = jnp.broadcast_to(weight.order, (group_sizes.shape[0], x.shape[1]))
            x = jnp.take_along_axis(x, orders[groups], axis=1)
        weight = weight.widened()
    matrices = jnp.moveaxis(weight, group_axis, 0)[groups]
    total = jnp.einsum(
        "ri,roi->ro",
        x.astype(jnp.float32),
        matrices.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return total.astype(x.dtype if result is None else result)
