"""Reference of `ssd_scan`: the recurrence as a scan over tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.ssd import Sizes, finish, rates, steps
from pallas_kernels.packed.rows import rows_of_tokens, snapshots_at


def ssd_scan(
    a_log: Float[Array, " heads"],
    d: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    states: Float[Array, "states heads head_dim d_state"],
    xbc: Float[Array, "tokens wide"],
    dt: Float[Array, "tokens heads"],
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    chunk_size: int,
    z: Float[Array, "tokens d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Computes in float32; reads all states before it writes any."""
    sizes, tokens, num_states = Sizes.of(states, xbc), len(xbc), len(states)
    x, b, c = sizes.split(xbc.astype(jnp.float32))
    b, c = (jnp.repeat(part, sizes.heads // sizes.groups, axis=1) for part in (b, c))
    step = steps(dt, dt_bias, dt_limits)
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
        x, b, c, step, row, place, end, kept = now
        state = jnp.where(place == 0, begun[row], state)
        decay = jnp.exp(rates(a_log) * step)[:, None, None]
        state = decay * state + (step[:, None] * x)[..., None] * b[:, None, :]
        pool = pool.at[end].set(state.astype(pool.dtype), mode="drop")
        pool = pool.at[kept].set(state.astype(pool.dtype), mode="drop")
        return (pool, state), jnp.sum(state * c[:, None, :], axis=-1)

    start = states, jnp.zeros(states.shape[1:], jnp.float32)
    now = (x, b, c, step, row, place, ends, kept)
    (pool, _), out = jax.lax.scan(visit, start, now)
    out = jnp.where(real[:, None, None], finish(out, x, d, z), 0.0)
    return out.astype(xbc.dtype), pool
