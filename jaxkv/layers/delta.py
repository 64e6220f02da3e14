"""Gated delta mixers (Yang et al., Gated Delta Networks): projections, short convolution, delta rule, gated norm."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.config.blocks import DeltaConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import Joining, Normed, matmul
from jaxkv.layers.norm import gated_group_norm
from jaxkv.layers.recurrence import StateWrite, convolve, recur
from pallas_kernels import delta_scan, delta_update
from pallas_kernels.dispatch import xla_if
from pallas_kernels.families import CHANNEL_DECAYS


class _Projections(NamedTuple):
    """What the delta rule takes of each token.

    Attributes:
        inputs: queries, keys and values before the convolution, in the first columns.
        rates: step sizes, before bias and softplus.
        shares: shares of the correction, before the sigmoid.
        gate: gates of the output.
        activation: its activation.
    """

    inputs: Float[Array, "tokens wide"]
    rates: Float[Array, "tokens decays"]
    shares: Float[Array, "tokens heads"]
    gate: Float[Array, "tokens width"]
    activation: Callable[[Array], Array]


def gated_delta_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"] | Normed,
    batch: StepBatch,
    tables: StateTables,
    *,
    delta: DeltaConfig,
    norm_eps: float,
    joining: Joining | None = None,
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Any]:
    """Computes the gated delta rule over each row's new tokens, and writes the state after them.

    With `delta.gate_rank` it is Kimi Delta Attention (Kimi Team, arXiv:2510.26692), where each component of a key has a
    decay of its own, and the output gate is a sigmoid.

    Args:
        params: "delta_in" [conv_channels + width, hidden_size]: queries, keys, values, output gates;
            "delta_gates" [2 * value_heads, hidden_size]: beta (the share of the correction), then the step size; "conv"
            [d_conv, conv_channels], the last row for the token itself; "a_log" and "dt_bias" [value_heads], float32;
            "delta_norm" [value_dim]; "delta_out" [hidden_size, width]. With `gate_rank`, "delta_in" [conv_channels,
            hidden_size] has no gates; "delta_gates" [2 * gate_rank + heads, hidden_size] has what decays and output
            gates are projected from, then beta; "delta_decay" [heads * key_dim, gate_rank]; "delta_gate" [width,
            gate_rank]; "dt_bias" [heads * key_dim].
        layer_cache: the layer's states, "conv" and "delta".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        delta: sizes.
        norm_eps: epsilon of the output norm.
        joining: the residual stream to which the output projection adds; `None` to return the output alone.
        writes: gets how the states are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's states after the step, and the mixer's output [tokens, hidden_size], or the sum with `joining`.
    """
    run = partial(matmul, implementation=implementation)
    inputs, rates, shares, gate, activation = _project(params, x, delta, run)
    convolved, conv = convolve(
        params, layer_cache, inputs, batch, tables, writes=writes, implementation=implementation
    )
    refusal = CHANNEL_DECAYS if delta.gate_rank is not None else None
    op = delta_update if batch.decode else delta_scan
    with xla_if(refusal, op=op.__name__, implementation=implementation) as family:
        mixed, state = recur(
            delta_update,
            delta_scan,
            (params["a_log"], params["dt_bias"]),
            layer_cache,
            "delta",
            (convolved, rates, shares),
            batch,
            tables,
            chunk_size=delta.chunk_size,
            writes=writes,
            implementation=family,
        )
    normed = gated_group_norm(
        params["delta_norm"],
        mixed.astype(inputs.dtype).reshape(-1, delta.value_dim),
        gate.reshape(-1, delta.value_dim),
        groups=1,
        gate_first=False,
        eps=norm_eps,
        activation=activation,
    )
    out = run(params["delta_out"], normed.reshape(-1, delta.width), joining=joining)
    return {"conv": conv, "delta": state}, out


def _project(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"] | Normed,
    delta: DeltaConfig,
    run: Callable[..., Array],
) -> _Projections:
    inputs, gates, rank = run(params["delta_in"], x), run(params["delta_gates"], x), delta.gate_rank
    if rank is None:
        shares, rates = jnp.split(gates, 2, axis=1)
        return _Projections(inputs, rates, shares, inputs[:, delta.conv_channels :], jax.nn.silu)
    low_decay, low_gate, shares = jnp.split(gates, (rank, 2 * rank), axis=1)
    rates, gate = run(params["delta_decay"], low_decay), run(params["delta_gate"], low_gate)
    return _Projections(inputs, rates, shares, gate, jax.nn.sigmoid)
