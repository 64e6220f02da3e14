"""`causal_conv` in plain XLA: each row is copied directly after its state, so that every window is a slice."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.causal_conv.arguments import ConvArrays
from pallas_kernels.packed.rows import owners, rows_of_tokens


def causal_conv(
    arrays: ConvArrays,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states tail channels"]]:
    """Implements `api.causal_conv`."""
    weight, bias, states, x, read_states, write_states = arrays[:6]
    cu_q_lens, snapshot_ends, snapshot_states = arrays[6:]
    tokens, (num_states, tail, channels) = x.shape[0], states.shape
    inputs = jax.lax.slice_in_dim(x, first_channel, first_channel + channels, axis=1)
    # The barrier orders all reads before the writes. For a single row XLA would otherwise read again after the write,
    # from a copy of the pool.
    begun = jax.lax.optimization_barrier(_get(states, read_states))
    if cu_q_lens is None:
        window = jnp.concatenate([begun, inputs[:, None]], axis=1)
        out = _weighed(weight, bias, [window[:, tap] for tap in range(tail + 1)], activation)
        real = write_states < num_states
        out = jnp.where(real[:, None], out, 0.0)
        return out.astype(x.dtype), _put(states, write_states, window[:, 1:], real)
    row, place = rows_of_tokens(cu_q_lens, tokens)
    # Row r's tokens are shifted by (r + 1) * tail, and its state is directly before them.
    first = cu_q_lens[:-1] + tail * jnp.arange(len(read_states), dtype=jnp.int32)
    behind = jnp.arange(tail, dtype=jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32) + tail * (row + 1)
    spread = jnp.zeros((tokens + tail * len(read_states), channels), x.dtype)
    spread = spread.at[token].set(inputs, unique_indices=True, mode="drop")
    spread = spread.at[first[:, None] + behind[None]].set(begun, unique_indices=True)
    taps = [_get(spread, token - (tail - tap)) for tap in range(tail + 1)]
    out = jnp.where((place >= 0)[:, None], _weighed(weight, bias, taps, activation), 0.0)
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    ended = _get(spread, (first + lengths)[:, None] + behind[None])
    states = _put(states, write_states, ended, lengths > 0)
    if snapshot_ends is not None and snapshot_states is not None:
        row = owners(cu_q_lens[1:], snapshot_ends - 1)
        kept = _get(spread, (snapshot_ends + tail * row)[:, None] + behind[None])
        real = (snapshot_ends > 0) & (snapshot_ends <= cu_q_lens[-1])
        states = _put(states, snapshot_states, kept, real)
    return out.astype(x.dtype), states


def _get(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _put(states: Array, index: Array, values: Array, real: Array) -> Array:
    """Writes the values where `real`; indices past the end are made distinct and dropped."""
    number = jnp.arange(len(index), dtype=jnp.int32)
    index = jnp.where(real & (index < len(states)), index, len(states) + number)
    return states.at[index].set(
        values, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _weighed(
    weight: Array, bias: Array | None, taps: list[Array], activation: str | None
) -> Float[Array, "tokens channels"]:
    """Returns the convolution in float32; it adds the oldest input first."""
    wide = weight.astype(jnp.float32)
    total = jnp.zeros(taps[0].shape, jnp.float32)
    for factor, tap in zip(wide, taps, strict=True):
        total += factor[None] * tap.astype(jnp.float32)
    if bias is not None:
        total += bias.astype(jnp.float32)[None]
    return jax.nn.silu(total) if activation == "silu" else total
