"""What a warpgroup computes of a token's step of a Mamba-2 layer, in registers. Knows no op."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention_scores import LOG2_E

Limits = tuple[float, float]


def softplus(x: Array) -> Array:
    """Returns log(1 + exp(x)) of float32 numbers to their last bits; the hardware has no log1p."""
    small = jnp.exp(-jnp.abs(x))
    above_one = 1.0 + small
    # What rounding took from `above_one` is made good by the quotient (Kahan).
    rounded = above_one - 1.0
    log1p = jnp.where(
        rounded == 0.0,
        small,
        jnp.log(above_one) * (small / jnp.where(rounded == 0.0, 1.0, rounded)),
    )
    return jnp.maximum(x, 0.0) + log1p


def step_of(dt: Array, dt_bias: Array, limits: Limits) -> Array:
    """Returns the steps of tokens whose dt and bias these are, in float32."""
    step = softplus(dt.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    low, high = limits
    step = jnp.maximum(step, low) if low > 0 else step
    return step if high == float("inf") else jnp.minimum(step, high)


def silu(x: Array) -> Array:
    """Returns x / (1 + exp(-x)) of float32 numbers; an inverse root squared is cheaper than a division."""
    root = lax.rsqrt(1.0 + jnp.exp2(-LOG2_E * x))
    return x * (root * root)
