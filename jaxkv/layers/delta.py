"""The gated delta mixer (Yang et al., Gated Delta Networks): projections, short convolution, delta rule, gated norm."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.config.blocks import DeltaConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import Joining, Normed, matmul
from jaxkv.layers.norm import gated_group_norm
from jaxkv.layers.recurrence import StateWrite, convolve, recur
from pallas_kernels import delta_scan, delta_update


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

    Args:
        params: "delta_in" [conv_channels + width, hidden_size]: queries, keys, values, output gates;
            "delta_gates" [2 * value_heads, hidden_size]: beta (the share of the correction), then the step size; "conv"
            [d_conv, conv_channels], the last row for the token itself; "a_log" and "dt_bias" [value_heads], float32;
            "delta_norm" [value_dim]; "delta_out" [hidden_size, width].
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
    projected = run(params["delta_in"], x)
    shares, rates = jnp.split(run(params["delta_gates"], x), 2, axis=1)
    convolved, conv = convolve(
        params, layer_cache, projected, batch, tables, writes=writes, implementation=implementation
    )
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
        implementation=implementation,
    )
    gate = projected[:, delta.conv_channels :].reshape(-1, delta.value_dim)
    normed = gated_group_norm(
        params["delta_norm"],
        mixed.astype(projected.dtype).reshape(-1, delta.value_dim),
        gate,
        groups=1,
        gate_first=False,
        eps=norm_eps,
    )
    out = run(params["delta_out"], normed.reshape(-1, delta.width), joining=joining)
    return {"conv": conv, "delta": state}, out
