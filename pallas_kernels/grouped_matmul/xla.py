"""`grouped_matmul` in plain XLA: `jax.lax.ragged_dot`, for any sizes and floating dtypes."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped


def grouped_matmul(
    weight: Shaped[Array, "some others inner"],
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> Float[Array, "rows out"]:
    """Implements `api.grouped_matmul`.

    On CPUs and GPUs XLA multiplies every row with every matrix: it expands each row once per group, with zeros in all
    but its own. For an H200 it copies the whole weight transposed before one dense product (seen in the compiled
    program).

    float32 inputs are multiplied at the highest precision: on NVIDIA GPUs the default would round them to TF32.
    """
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
