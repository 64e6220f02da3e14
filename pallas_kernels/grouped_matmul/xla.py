"""`grouped_matmul` as XLA does it: `jax.lax.ragged_dot`. Takes any sizes and floating dtypes."""

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
    """Computes the product as `api.grouped_matmul` says.

    On CPUs and GPUs every row meets every matrix: XLA lays each row out once per group, zeros but in its own, and for
    an H200 it copies the whole weight transposed before one dense product (seen in what it compiles).

    A float32 weight asks for float32 products: on NVIDIA GPUs the default would round its inputs to TF32.
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
