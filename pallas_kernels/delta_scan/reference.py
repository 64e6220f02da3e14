"""Reference of `delta_scan`: the recurrence as a scan over tokens. `delta_update` is one token of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.delta import DeltaSizes, tokens_of
from pallas_kernels.packed.rows import rows_of_tokens, snapshots_at


def delta_scan(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    states: Float[Array, "states heads key_dim value_dim"],
    qkv: Float[Array, "tokens wide"],
    a: Float[Array, "tokens heads"],
    b: Float[Array, "tokens heads"],
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Computes in float32; reads all states before it writes any."""
    tokens, num_states = len(qkv), len(states)
    parts = tokens_of(a_log, dt_bias, qkv, a, b, DeltaSizes.of(states, qkv))
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
        state = jnp.where(place == 0, begun[row], state) * jnp.exp(part.decay)[:, None, None]
        known = jnp.sum(state * part.k[..., None], axis=1)
        correction = (part.v - known) * part.beta[:, None]
        state = state + part.k[..., None] * correction[:, None, :]
        for target in (end, kept):
            pool = pool.at[target].set(state.astype(pool.dtype), mode="drop")
        return (pool, state), jnp.sum(state * part.q[..., None], axis=1)

    start = states, jnp.zeros(states.shape[1:], jnp.float32)
    (pool, _), out = jax.lax.scan(visit, start, (parts, row, place, ends, kept))
    return jnp.where(real[:, None, None], out, 0.0).astype(qkv.dtype), pool
