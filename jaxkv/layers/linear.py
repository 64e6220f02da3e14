"""A projection by a weight in Hugging Face's [out, in] orientation. Nothing is transposed or converted for it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    weight: Float[Array, "out in"],
    x: Float[Array, "tokens in"],
    bias: Float[Array, " out"] | None = None,
) -> Float[Array, "tokens out"]:
    """Computes `x @ weight.T + bias` in the weight's dtype, accumulated in float32."""
    y = project(weight, x)
    return y if bias is None else y + bias[None]


def project(
    weight: Float[Array, "out in"],
    x: Float[Array, "tokens in"],
    *,
    result: jnp.dtype | type | None = None,
) -> Float[Array, "tokens out"]:
    """Contracts the last axes, into the weight's dtype or `result`.

    A float32 weight asks for float32 products: on NVIDIA GPUs the default would round its inputs to TF32.
    """
    exact = weight.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=result,
    )


def scaled(x: Float[Array, "tokens width"], factor: float) -> Float[Array, "tokens width"]:
    """Multiplies by a constant of the family; most have none, and then nothing is computed."""
    return x if factor == 1.0 else x * factor
