"""A recurrence over packed tokens, one by one: for the references of the scans, and for the fixed order of sums."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from pallas_kernels.arguments.states import StateTables
from pallas_kernels.packed.rows import rows_of_tokens, snapshots_at


def scan_tokens(
    step: Callable[..., tuple[Array, Array]],
    states: Float[Array, "states ..."],
    parts: PyTree[Shaped[Array, "tokens ..."]],
    tables: StateTables,
    *,
    chunk_size: int,
    rounds: bool = False,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "states ..."]]:
    """Returns the tokens' outputs in float32, zeros for padding tokens, and the updated pool.

    All states are read before any is written.

    Args:
        step: function of a state in float32 and of a token's inputs that returns the next state and the output.
        states: the pool of states.
        parts: the tokens' inputs.
        tables: the rows' bounds, lengths and states.
        chunk_size: tokens of a chunk; snapshots are written at ends of chunks and of rows.
        rounds: round the state to the pool's dtype after every token, as a decode step does, so that the states do not
            depend on how the tokens are divided among steps.
    """
    cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states = tables
    given, num_states = len(jax.tree.leaves(parts)[0]), len(states)
    # XLA inlines a loop of a single token and compiles its sums in another way, so that one gets a padding token.
    tokens = max(given, 2) if rounds else given
    parts = jax.tree.map(
        lambda part: jnp.pad(part, ((0, tokens - given), *((0, 0),) * (part.ndim - 1))), parts
    )
    row, place = rows_of_tokens(cu_q_lens, tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    real = place >= 0
    position = seq_lens[row] - (cu_q_lens[row + 1] - token)
    last = real & (token + 1 == cu_q_lens[row + 1])
    ends = jnp.where(last, write_states[row], num_states)
    kept = snapshots_at(token + 1, snapshot_ends, snapshot_states, num_states)
    kept = jnp.where(last | (real & ((position + 1) % chunk_size == 0)), kept, num_states)
    begun = states.at[read_states].get(mode="fill", fill_value=0)
    # The barrier orders all reads before the writes. For a single token XLA would otherwise read again after the write,
    # from a copy of the pool.
    begun = jax.lax.optimization_barrier(begun).astype(jnp.float32)

    def visit(carry: tuple, now: tuple) -> tuple:
        pool, state = carry
        part, row, place, end, kept = now
        state, out = step(jnp.where(place == 0, begun[row], state), part)
        if rounds:
            state = state.astype(pool.dtype).astype(jnp.float32)
        for target in (end, kept):
            pool = pool.at[target].set(state.astype(pool.dtype), mode="drop")
        return (pool, state), out

    start = states, jnp.zeros(states.shape[1:], jnp.float32)
    (pool, _), out = jax.lax.scan(visit, start, (parts, row, place, ends, kept))
    return jnp.where(real.reshape(-1, *(1,) * (out.ndim - 1)), out, 0.0)[:given], pool
