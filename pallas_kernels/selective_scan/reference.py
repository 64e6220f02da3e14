"""Reference of `selective_scan`: the recurrence as a scan over tokens. `selective_update` is one token of it."""

from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.selective import (
    SelectiveArrays,
    SelectiveTokens,
    advance,
    output,
    rates_of,
    tokens_of,
)
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.packed.token_scan import scan_tokens


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
    rates = rates_of(a_log)

    def step(state: Array, token: SelectiveTokens) -> tuple[Array, Array]:
        row = SelectiveTokens(*(value[None] for value in token))
        state = advance(state[None], row, rates)
        return state[0], output(state, row, skip)[0]

    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    parts = tokens_of(SelectiveArrays(a_log, skip, dt_bias, states, x, dt, b, c))
    out, pool = scan_tokens(step, states, parts, StateTables(*of_rows), chunk_size=chunk_size)
    return out.astype(x.dtype), pool
