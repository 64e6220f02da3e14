"""Feed-forward layers: gated, as in Llama (Shazeer, GLU Variants Improve Transformer), and plain."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float

from jaxkv.layers.adapted import Adapted, LayerParams
from jaxkv.layers.linear import (
    Joining,
    Normed,
    Weight,
    in_few_bits,
    linear,
    matmul,
)
from pallas_kernels.activations import activate, gate
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.skinny_matmul.api import MOST_ROWS


def gated_feed_forward(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"] | Normed,
    *,
    activation: str,
    gate_multiplier: float = 1.0,
    joining: Joining | None = None,
    implementation: str | None,
) -> Any:  # noqa: ANN401 - an array, or a `Weighed` if a norm follows
    """Computes `down(activation(gate(x)) * up(x))`.

    Args:
        params: "gate_up" [2 * ffn, hidden_size], gate first, "down" [hidden_size, ffn], and if the model has them
            their biases "gate_up_bias" and "down_bias".
        x: normalised hidden states.
        activation: a name in `pallas_kernels.activations.ACTIVATIONS`.
        gate_multiplier: factor of the gate before its activation.
        joining: the residual stream to which the last projection adds; `None` to return the output alone.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The output [tokens, hidden_size], or its sum with `joining`.
    """
    if implementation != "xla" or joining is not None or isinstance(x, Normed):
        run = partial(matmul, implementation=implementation)
        inner = _gated_product(
            params["gate_up"],
            x,
            params.get("gate_up_bias"),
            activation=activation,
            gate_multiplier=gate_multiplier,
            implementation=implementation,
        )
        return run(params["down"], inner, bias=params.get("down_bias"), joining=joining)
    run = partial(linear, implementation=implementation)
    gate_up = run(params["gate_up"], x, params.get("gate_up_bias"))
    inner = gate(gate_up, activation=activation, gate_multiplier=gate_multiplier)
    return run(params["down"], inner, params.get("down_bias"))


def _gated_product(
    weight: Weight,
    x: Float[Array, "tokens hidden_size"] | Normed,
    bias: Float[Array, " gate_and_up"] | None,
    *,
    activation: str,
    gate_multiplier: float,
    implementation: str | None,
) -> Float[Array, "tokens ffn"]:
    """Returns `activation(gate(x)) * up(x)`, by one kernel unless adapters are added in between."""
    run = partial(matmul, bias=bias, implementation=implementation)
    fused = partial(run, activation=activation, gated=True, gate_multiplier=gate_multiplier)
    if not isinstance(weight, Adapted):
        return fused(weight, x)
    inner = gate(run(weight, x), activation=activation, gate_multiplier=gate_multiplier)
    if inner.shape[0] > MOST_ROWS and not is_fixed() and not in_few_bits(weight):
        # XLA rounds both forms alike.
        return inner
    # Our kernel rounds once, at the end. Tokens without an adapter keep its bits, for a second pass over the weight.
    return weight.chosen(inner, fused(weight.weight, x))


def plain_feed_forward(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"],
    *,
    activation: str,
    implementation: str | None,
) -> Float[Array, "tokens hidden_size"]:
    """Computes `down(activation(up(x)))`.

    Args:
        params: "up" [ffn, hidden_size], "down" [hidden_size, ffn], and if the model has them their biases "up_bias" and
            "down_bias".
        x: normalised hidden states.
        activation: a name in `pallas_kernels.activations.ACTIVATIONS`.
        implementation: family of implementations for weights in few bits; `None` for the best.
    """
    run = partial(linear, implementation=implementation)
    inner = activate(run(params["up"], x, params.get("up_bias")), activation=activation)
    return run(params["down"], inner, params.get("down_bias"))
