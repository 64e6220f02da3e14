"""Activations in float32 for arrays in registers, and the discretisation step (dt) of a Mamba-2 layer."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.softmax import LOG2_E

Limits = tuple[float, float]

_ROOT = 0.7978845608028654  # sqrt(2 / pi)


def softplus(x: Array) -> Array:
    """Returns log(1 + exp(x)) of float32 values; the hardware has no log1p.

    log(1 + y) is 2 artanh(y / (2 + y)), whose series needs 7 terms for y up to 1. The result errs by up to 4 units in
    the last place, and with approximate exponentials by up to 4e-6 of itself where x is near -86.
    """
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2.0 + small)
    square, series = ratio * ratio, jnp.full_like(ratio, 1.0 / 13.0)
    for power in (11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / power
    return jnp.maximum(x, 0.0) + 2.0 * ratio * series


def step_of(dt: Array, dt_bias: Array, limits: Limits) -> Array:
    """Returns the discretisation steps softplus(dt + dt_bias) in float32, clamped to `limits` (low, high)."""
    step = softplus(dt.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    low, high = limits
    step = jnp.maximum(step, low) if low > 0 else step
    return step if high == float("inf") else jnp.minimum(step, high)


def sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)) of float32 values."""
    return 1.0 / (1.0 + jnp.exp(-x))


def silu(x: Array) -> Array:
    """Returns x / (1 + exp(-x)) of float32 values; a squared reciprocal square root is cheaper than a division."""
    root = lax.rsqrt(1.0 + jnp.exp2(-LOG2_E * x))
    return x * (root * root)


def _gelu_tanh(x: Array) -> Array:
    """Returns the tanh form of GELU, from exp2 and a division; the hardware's `tanh.approx` errs by up to 5e-4."""
    inner = _ROOT * (x + 0.044715 * (x * x * x))
    return x * (1.0 - 1.0 / (jnp.exp2((2.0 * LOG2_E) * inner) + 1.0))


def _relu2(x: Array) -> Array:
    positive = jnp.maximum(x, 0.0)
    return positive * positive


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


def activated(x: Array, activation: str | None) -> Array:
    """Returns the named activation of float32 values; `None` is the identity."""
    return x if activation is None else ACTIVATIONS[activation](x)
