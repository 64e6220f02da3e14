"""`grouped_matmul` in plain XLA: `jax.lax.ragged_dot`, for any sizes and floating dtypes."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import product


def grouped_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> Float[Array, "rows out"]:
    """Implements `api.grouped_matmul`; weights in few bits are multiplied a group at a time.

    On CPUs and GPUs XLA multiplies every row with every matrix: it expands each row once per group, with zeros in all
    but its own. For an H200 it copies the whole weight transposed before one dense product (seen in the compiled
    program).

    float32 inputs are multiplied at the highest precision: on NVIDIA GPUs the default would round them to TF32.
    """
    if isinstance(weight, FewBits):
        wanted = jnp.dtype(x.dtype if result is None else result)
        return _by_groups(weight, x, group_sizes, group_axis, wanted)
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[group_axis],
    )
    total = jax.lax.ragged_dot_general(
        x,
        weight,
        group_sizes,
        dimensions,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return total.astype(x.dtype if result is None else result)


def _by_groups(
    weight: FewBits,
    x: Float[Array, "rows inner"],
    sizes: Int[Array, " groups"],
    group_axis: int,
    result: DTypeLike,
) -> Float[Array, "rows out"]:
    """Multiplies all rows with each group that has rows, and keeps the group's own; only one group is widened."""
    ends = jnp.cumsum(sizes)

    def body(group: Int[Array, ""], total: Float[Array, "rows out"]) -> Float[Array, "rows out"]:
        own = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, group, group_axis, keepdims=False),
            weight,
        )
        row = jnp.arange(x.shape[0])
        is_own = (row >= ends[group] - sizes[group]) & (row < ends[group])

        def multiplied() -> Float[Array, "rows out"]:
            return jnp.where(is_own[:, None], product(own, x, result=result), total)

        return jax.lax.cond(sizes[group] > 0, multiplied, lambda: total)

    out = weight.shape[1 - group_axis]
    # Rows of a group are replaced. Zeros alone depend on nothing, so XLA would make those of all layers at once.
    is_any = jnp.arange(x.shape[0]) < ends[-1]
    total = jnp.where(is_any[:, None], x[:, :1], 0).astype(result)
    total = jnp.broadcast_to(total, (x.shape[0], out))
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(sizes.shape[0]), body, total)
