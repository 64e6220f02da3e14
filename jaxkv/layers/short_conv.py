"""The gated short convolution (Liquid AI, LFM2): two gates around a depthwise convolution over a few tokens."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import linear
from jaxkv.layers.recurrence import StateWrite, convolve


def short_conv_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: StateTables,
    *,
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Computes `out(after * conv(before * inner))` over each row's new tokens, and writes the state after them.

    Args:
        params: "short_in" [3 * channels, hidden_size]: the gate before the convolution, the gate after it and the
            inner value; "conv" [d_conv, channels], the last row for the token itself; "short_out"
            [hidden_size, channels]. If the model has them: "short_in_bias", "conv_bias" and "short_out_bias".
        layer_cache: the layer's states, "conv".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        writes: gets how the states are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's states after the step, and the mixer's output.
    """
    run = partial(linear, implementation=implementation)
    projected = run(params["short_in"], x, params.get("short_in_bias"))
    before, after, inner = jnp.split(projected, 3, axis=1)
    convolved, conv = convolve(
        params,
        layer_cache,
        before * inner,
        batch,
        tables,
        activation=None,
        writes=writes,
        implementation=implementation,
    )
    gated = after * convolved.astype(x.dtype)
    return {"conv": conv}, run(params["short_out"], gated, params.get("short_out_bias"))
