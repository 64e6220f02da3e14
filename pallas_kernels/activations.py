"""Activations and gates of feed-forwards as functions of float32 arrays in XLA."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

CLAMPED_RATE = 1.702
"""Factor of the gate in the sigmoid of `clamped_gate`."""


def gate(
    gate_up: Float[Array, "*rows gate_and_up"], *, activation: str, gate_multiplier: float = 1.0
) -> Float[Array, "*rows ffn"]:
    """Returns `activation(gate_multiplier * gate) * up` for the halves of `gate_up`, computed in float32."""
    gates, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gates = gates if gate_multiplier == 1.0 else gates * gate_multiplier
    return (ACTIVATIONS[activation](gates) * up).astype(gate_up.dtype)


def clamped_gate(
    gate_up: Float[Array, "*rows gate_and_up"], *, limit: float
) -> Float[Array, "*rows ffn"]:
    """Returns `(up + 1) * gate * sigmoid(1.702 * gate)` for the halves of `gate_up`, computed in float32 (GPT-OSS).

    `gate` is clamped to at most `limit`, and `up` to [-limit, limit].
    """
    gates, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    gates, up = jnp.minimum(gates, limit), jnp.clip(up, -limit, limit)
    return ((up + 1) * gates * jax.nn.sigmoid(CLAMPED_RATE * gates)).astype(gate_up.dtype)


def activate(x: Float[Array, "*rows ffn"], *, activation: str) -> Float[Array, "*rows ffn"]:
    """Returns the activation of `x`, computed in float32."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)
