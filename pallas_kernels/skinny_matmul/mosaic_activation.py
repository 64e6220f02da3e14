"""Activations in a kernel's registers, in float32, from what the hardware has. Knows no op."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention_scores import LOG2_E
from pallas_kernels.mosaic_steps import silu

_ROOT = 0.7978845608028654  # sqrt(2 / pi)


def _gelu_tanh(x: Array) -> Array:
    """GELU by its tanh; the hardware's own is wrong by up to 5e-4, this one is made of exp2 and a division."""
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
    """Returns the activation of float32 numbers; `None` leaves them as they are."""
    return x if activation is None else ACTIVATIONS[activation](x)
