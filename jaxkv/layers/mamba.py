"""The Mamba-2 mixer (Dao and Gu, Transformers are SSMs): projection, short convolution, state space, gated norm."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.config.blocks import MambaConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import linear
from jaxkv.layers.norm import gated_group_norm
from jaxkv.layers.recurrence import StateWrite, convolve, recur
from jaxkv.layers.shards import Shards
from pallas_kernels import ssd_scan, ssd_update


def mamba2_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: StateTables,
    *,
    mamba: MambaConfig,
    norm_eps: float,
    multipliers: tuple[float, ...] = (),
    shards: Shards | None = None,
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Computes the state-space layer over each row's new tokens, and writes the state after them.

    Args:
        params: "ssm_in" [in_channels, hidden_size]: gate, input, B, C, step sizes; "conv" [d_conv, conv_channels], the
            last row for the token itself; "a_log", "dt_bias" and "skip" [heads], float32; "ssm_out"
            [hidden_size, d_inner]. If the model has them: "ssm_in_bias", "conv_bias", "ssm_norm" [d_inner] and
            "ssm_out_bias".
        layer_cache: the layer's states, "conv" and "ssm".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        mamba: sizes.
        norm_eps: epsilon of the gated norm.
        multipliers: factors of gate, input, B, C and step sizes; empty for none.
        shards: the devices that divide the components of one norm; `None` if each has whole groups of them.
        writes: gets how the states are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's states after the step, and the mixer's output.
    """
    run = partial(linear, implementation=implementation)
    projected = run(params["ssm_in"], x, params.get("ssm_in_bias"))
    if any(factor != 1.0 for factor in multipliers):
        projected = projected * jnp.asarray(_by_channel(mamba, multipliers), x.dtype)[None]
    convolved, conv = convolve(
        params,
        layer_cache,
        projected,
        batch,
        tables,
        first_channel=mamba.d_inner,
        writes=writes,
        implementation=implementation,
    )
    dt = projected[:, mamba.d_inner + mamba.conv_channels :]
    weights = params["a_log"], params["skip"], params["dt_bias"]
    mixed, ssm = recur(
        ssd_update,
        ssd_scan,
        weights,
        layer_cache,
        "ssm",
        (convolved, dt),
        batch,
        tables,
        chunk_size=mamba.chunk_size,
        writes=writes,
        implementation=implementation,
        dt_limits=mamba.dt_limit,
    )
    mixed = mixed.reshape(x.shape[0], mamba.d_inner)
    gated = _gate(params, mixed, projected[:, : mamba.d_inner], mamba, norm_eps, shards)
    out = run(params["ssm_out"], gated.astype(x.dtype), params.get("ssm_out_bias"))
    return {"conv": conv, "ssm": ssm}, out


def _gate(
    params: LayerParams,
    mixed: Float[Array, "tokens d_inner"],
    gate: Float[Array, "tokens d_inner"],
    mamba: MambaConfig,
    norm_eps: float,
    shards: Shards | None,
) -> Float[Array, "tokens d_inner"]:
    if not mamba.norm_groups:
        gate = jax.nn.silu(gate.astype(jnp.float32))
        return (mixed.astype(jnp.float32) * gate).astype(mixed.dtype)
    return gated_group_norm(
        params["ssm_norm"],
        mixed,
        gate,
        groups=mamba.norm_groups,
        gate_first=mamba.gate_first,
        eps=norm_eps,
        shards=shards,
    )


def _by_channel(mamba: MambaConfig, multipliers: tuple[float, ...]) -> Float[np.ndarray, " wide"]:
    """Returns the factor of each channel of the input projection."""
    shared = mamba.groups * mamba.d_state
    widths = (mamba.d_inner, mamba.d_inner, shared, shared, mamba.heads)
    return np.repeat(np.asarray(multipliers, np.float32), widths)
