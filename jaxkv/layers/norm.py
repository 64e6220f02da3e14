"""Root-mean-square normalisation (Zhang and Sennrich), rounded where Hugging Face rounds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    weight: Float[Array, " width"], x: Float[Array, "*rows width"], *, eps: float
) -> Float[Array, "*rows width"]:
    """Scales rows to unit root mean square in float32, casts to the dtype of `x`, then weighs."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    unit = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return unit * weight.reshape((1,) * (x.ndim - 1) + weight.shape)
