"""Reference of `selective_scan`: the recurrence as a scan over tokens. `selective_update` is one token of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.selective import (
    SelectiveArrays,
    SelectiveTokens,
    advance,
    output,
    rates_of,
    tokens_of,
)
from pallas_kernels.packed.rows import rows_of_tokens, snapshots_at


def selective_scan(
    a_log: Float[Array, "channels d_state"],
    skip: Float[Array, " channels"],
    dt_bias: Float[Array, " channels"],
    states: Float[Array, "states channels d_state"],
    x: Float[Array, "tokens channels"],
    dt: Float[Array, "tokens channels"],
    b: Float[Array, "tokens d_state"],
    c: Float[Array, "tokens d_state"],
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states channels d_state"]]:
    """Computes in float32; reads all states before it writes any."""
    tokens, num_states = len(x), len(states)
    rates = rates_of(a_log)
    row, place = rows_of_tokens(cu_q_lens, tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    real = place >= 0
    position = seq_lens[row] - (cu_q_lens[row + 1] - token)
    last = real & (token + 1 == cu_q_lens[row + 1])
    ends = jnp.where(last, write_states[row], num_states)
    kept = snapshots_at(token + 1, snapshot_ends, snapshot_states, num_states)
    kept = jnp.where(last | (real & ((position + 1) % chunk_size == 0)), kept, num_states)
    begun = states.at[read_states].get(mode="fill", fill_value=0).astype(jnp.float32)

    def visit(carry: tuple, now: tuple) -> tuple:
        pool, state = carry
        part, row, place, end, kept = now
        part = SelectiveTokens(*(value[None] for value in part))
        state = advance(jnp.where(place == 0, begun[row], state)[None], part, rates)
        for target in (end, kept):
            pool = pool.at[target].set(state[0].astype(pool.dtype), mode="drop")
        return (pool, state[0]), output(state, part, skip)[0]

    start = states, jnp.zeros(states.shape[1:], jnp.float32)
    parts = tokens_of(SelectiveArrays(a_log, skip, dt_bias, states, x, dt, b, c))
    (pool, _), out = jax.lax.scan(visit, start, (parts, row, place, ends, kept))
    return jnp.where(real[:, None], out, 0.0).astype(x.dtype), pool
