"""Public entry point of `selective_scan`: the recurrence of a Mamba layer over packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.selective import SelectiveArrays, check_selective
from pallas_kernels.arguments.states import StateTables, check_scan
from pallas_kernels.dispatch import choose
from pallas_kernels.selective_scan import xla


def selective_scan(
    a_log: Shaped[Array | np.ndarray, "channels d_state"],
    skip: Shaped[Array | np.ndarray, " channels"],
    dt_bias: Shaped[Array | np.ndarray, " channels"],
    states: Float[Array, "states channels d_state"],
    x: Shaped[Array | np.ndarray, "tokens channels"],
    dt: Shaped[Array | np.ndarray, "tokens channels"],
    b: Shaped[Array | np.ndarray, "tokens d_state"],
    c: Shaped[Array | np.ndarray, "tokens d_state"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    snapshot_ends: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    snapshot_states: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    *,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states channels d_state"]]:
    """Computes the selective state space over each row's tokens (Mamba, Gu and Dao, arXiv:2312.00752).

    With `step = softplus(dt + dt_bias)`, for each channel: `state = exp(-exp(a_log) * step) * state + step * x * b`,
    and `out = sum(c * state) + skip * x`.

    Rows are cut into chunks where a position, counted from token 0 of the sequence, is a multiple of `chunk_size`. A
    row reads its state before it writes one, so both may be the same. Rows without tokens change nothing. In one call,
    no state may be read by one row and written by another, and a snapshot's state must not be used otherwise; this is
    checked for concrete ids.

    Args:
        a_log: logarithm of the decay rate of each component of each channel's state.
        skip: each channel's factor of the connection from x to the output.
        dt_bias: bias of dt.
        states: the pool of states, floating, usually float32. Donate it for an update in place.
        x: each token's inputs, the result of `causal_conv`. Padding tokens may hold any value, here and below.
        dt: each token's step per channel, before bias and softplus.
        b: each token's factors from a channel's input to its state.
        c: each token's factors from a channel's state to its output.
        cu_q_lens: int32 bounds: row r's tokens are `x[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
        seq_lens: int32 number of tokens of each row, including those before this call; 0 for a padding row.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row; an id past the end writes nothing.
        snapshot_ends: int32, ascending: for each snapshot the number of packed tokens before it. Only ends of chunks
            and of rows are available; others are ignored.
        snapshot_states: int32 state that each snapshot is written to; an id past the end writes nothing.
        chunk_size: tokens of a chunk.
        implementation: "xla", or `None` for the first that can run.

    Returns:
        The outputs in x's dtype, zeros for padding tokens; and the updated pool.

    Raises:
        ValueError: shapes, dtypes, options or concrete ids do not fit.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    check_selective(a_log, skip, dt_bias, states, x, dt, b, c)
    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    sizes = {"num_states": states.shape[0], "tokens": x.shape[0], "chunk_size": chunk_size}
    check_scan(*of_rows, **sizes)
    choose("selective_scan", {"xla": lambda: None}, implementation)
    if not x.shape[0] or not len(read_states):
        return jnp.zeros(x.shape, x.dtype), jnp.asarray(states)
    given = (a_log, skip, dt_bias, states, x, dt, b, c)
    # `None` is an empty pytree, so absent tables stay `None`.
    given, of_rows = jax.tree.map(jnp.asarray, (given, of_rows))
    layer, tables = SelectiveArrays(*given), StateTables(*of_rows)
    return xla.selective_scan(layer, tables, chunk_size=chunk_size)
