"""Reference of `gathered_matmul`: each row times each matrix that it chooses, bias and activation, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue


def gathered_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows_of_x inner"],
    chosen: Int32[Array, "rows count"],
    bias: Float[Array, "groups out"] | None = None,
    weights: Float32[Array, "rows count"] | None = None,
    *,
    group_axis: int = 0,
    epilogue: Epilogue = SUMS,
) -> Float[Array, "rows *count columns"]:
    """Implements `api.gathered_matmul`."""
    rows, count = chosen.shape
    each = x.reshape(rows, len(x) // rows, -1).astype(jnp.float32)
    each = jnp.broadcast_to(each, (rows, count, x.shape[1]))
    if isinstance(weight, FewBits):
        if weight.order is not None:
            groups = weight.shape[group_axis]
            orders = jnp.broadcast_to(weight.order, (groups, x.shape[1]))
            each = jnp.take_along_axis(each, orders[chosen], axis=2)
        weight = weight.widened()
    matrices = jnp.moveaxis(weight, group_axis, 0)[chosen].astype(jnp.float32)
    sums = jnp.einsum("rci,rcoi->rco", each, matrices, precision=jax.lax.Precision.HIGHEST)
    sums = sums if bias is None else sums + bias[chosen].astype(jnp.float32)
    if weights is not None:
        sums = jnp.sum(sums * weights[:, :, None], axis=1)
    return epilogue.applied(sums)
