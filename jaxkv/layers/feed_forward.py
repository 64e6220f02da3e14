"""The gated feed-forward of Llama and its relatives (Shazeer, GLU variants)."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.layers.linear import linear

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_feed_forward(
    params: Mapping[str, Array], x: Float[Array, "tokens hidden_size"], *, activation: str
) -> Float[Array, "tokens hidden_size"]:
    """Computes `down(activation(gate(x)) * up(x))`.

    Args:
        params: "gate_up" [2 * ffn, hidden_size], gate first, "down" [hidden_size, ffn], and their biases
            "gate_up_bias" and "down_bias" where the model has them.
        x: normalised hidden states.
        activation: a name in `ACTIVATIONS`.
    """
    gate_up = linear(params["gate_up"], x, params.get("gate_up_bias"))
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    inner = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
    return linear(params["down"], inner, params.get("down_bias"))
