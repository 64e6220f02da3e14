"""The Mamba mixer (Gu and Dao, Mamba): projection, short convolution, selective state space, gate."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.config.blocks import Mamba1Config
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import linear
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.recurrence import StateWrite, convolve, recur
from jaxkv.layers.shards import Shards
from pallas_kernels import selective_scan, selective_update


def mamba1_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: StateTables,
    *,
    mamba: Mamba1Config,
    norm_eps: float,
    shards: Shards | None = None,
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Computes the state-space layer over each row's new tokens, and writes the state after them.

    Args:
        params: "ssm_in" [2 * channels, hidden_size]: input, then gate; "conv" [d_conv, channels], the last row for the
            token itself; "select" [dt_rank + 2 * d_state, channels]: step sizes in low rank, B, C; "step"
            [channels, dt_rank]; "a_log" [channels, d_state], "dt_bias" and "skip" [channels], float32; "ssm_out"
            [hidden_size, channels]. If the model has them: "ssm_in_bias", "conv_bias", "ssm_out_bias", and the norms
            "dt_norm" [dt_rank], "b_norm" and "c_norm" [d_state].
        layer_cache: the layer's states, "conv" and "ssm".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        mamba: sizes.
        norm_eps: epsilon of the norms.
        shards: the devices that divide the channels; `None` if one has all.
        writes: gets how the states are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's states after the step, and the mixer's output.
    """
    run = partial(linear, implementation=implementation)
    projected = run(params["ssm_in"], x, params.get("ssm_in_bias"))
    inner, gate = jnp.split(projected, 2, axis=1)
    convolved, conv = convolve(
        params, layer_cache, inner, batch, tables, writes=writes, implementation=implementation
    )
    convolved = convolved.astype(x.dtype)
    selected = run(params["select"], convolved)
    selected = selected if shards is None else shards.summed(selected)
    dt, b, c = jnp.split(selected, (mamba.dt_rank, mamba.dt_rank + mamba.d_state), axis=1)
    if mamba.norms:
        dt, b, c = (
            rms_norm(params[name], part, eps=norm_eps)
            for name, part in (("dt_norm", dt), ("b_norm", b), ("c_norm", c))
        )
    weights = params["a_log"], params["skip"], params["dt_bias"]
    mixed, ssm = recur(
        selective_update,
        selective_scan,
        weights,
        layer_cache,
        "ssm",
        (convolved, run(params["step"], dt), b, c),
        batch,
        tables,
        chunk_size=mamba.chunk_size,
        writes=writes,
        implementation=implementation,
    )
    gated = mixed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    out = run(params["ssm_out"], gated.astype(x.dtype), params.get("ssm_out_bias"))
    return {"conv": conv, "ssm": ssm}, out
