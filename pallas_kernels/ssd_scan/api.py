"""Public entry point of `ssd_scan`: the recurrence of a Mamba-2 layer over packed rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.ssd import SsdArrays, check_layer
from pallas_kernels.arguments.states import StateTables, check_scan
from pallas_kernels.dispatch import choose
from pallas_kernels.ssd_scan import mosaic_gpu, xla


def ssd_scan(
    a_log: Shaped[Array | np.ndarray, " heads"],
    d: Shaped[Array | np.ndarray, " heads"],
    dt_bias: Shaped[Array | np.ndarray, " heads"],
    states: Float[Array, "states heads head_dim d_state"],
    xbc: Shaped[Array | np.ndarray, "tokens wide"],
    dt: Shaped[Array | np.ndarray, "tokens heads"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    snapshot_ends: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    snapshot_states: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    *,
    chunk_size: int,
    z: Shaped[Array | np.ndarray, "tokens d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Computes the state-space recurrence of Mamba-2 over each row's tokens (SSD, arXiv:2405.21060).

    With step = clip(softplus(dt + dt_bias), *dt_limits), for each head:
    `state = exp(-exp(a_log) * step) * state + step * outer(x, B)` and `out = state @ C + d * x`.

    Rows are cut into chunks where a position, counted from token 0 of the sequence, is a multiple of `chunk_size`;
    chunks are computed as matrix products. So with float32 states a sequence that is split into calls at such multiples
    gives the same bits as one that is not; other splits, and states of 16 bits, which are rounded between calls, agree
    up to rounding. A row reads its state before it writes one, so both may be the same. Rows without tokens change
    nothing. In one call, no state may be read by one row and written by another, and a snapshot's state must not be
    used otherwise; this is checked for concrete ids.

    Args:
        a_log: logarithm of each head's decay rate.
        d: each head's factor of the skip connection from x to the output.
        dt_bias: bias of dt.
        states: the pool of states, floating, usually float32 for any dtype of xbc. Donate it for an update in place.
        xbc: result of `causal_conv`: each token's x of all heads, then B of all groups, then C. Head h uses group
            `h // (heads // groups)`. Padding tokens may hold any value.
        dt: each token's step per head, before bias and softplus.
        cu_q_lens: int32 bounds: row r's tokens are `xbc[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
        seq_lens: int32 number of tokens of each row, including those before this call; 0 for a padding row.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row; an id past the end writes nothing.
        snapshot_ends: int32, ascending: for each snapshot the number of packed tokens before it. Only ends of chunks
            and of rows are available; others are ignored.
        snapshot_states: int32 state that each snapshot is written to; an id past the end writes nothing.
        chunk_size: tokens of a chunk, from the model's configuration.
        z: gates of the outputs, which are multiplied by silu(z); `None` for none.
        dt_limits: least and greatest step.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The outputs in xbc's dtype, zeros for padding tokens; and the updated pool.

    Raises:
        ValueError: shapes, dtypes, options or concrete ids do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    check_layer(a_log, d, dt_bias, states, xbc, dt, z, dt_limits)
    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    sizes = {"num_states": states.shape[0], "tokens": xbc.shape[0], "chunk_size": chunk_size}
    check_scan(*of_rows, **sizes)
    given = (a_log, d, dt_bias, states, xbc, dt)
    # `None` is an empty pytree, so absent arguments stay `None`.
    given, of_rows, gate = jax.tree.map(jnp.asarray, (given, of_rows, z))
    layer, tables = SsdArrays(*given), StateTables(*of_rows)
    refuses = partial(mosaic_gpu.why_not, layer.states, layer.xbc, chunk_size=chunk_size)
    reasons = {"mosaic_gpu": refuses, "xla": lambda: None}
    chosen = choose("ssd_scan", reasons, implementation)
    if not xbc.shape[0] or not len(read_states):
        return jnp.zeros((xbc.shape[0], *states.shape[1:3]), xbc.dtype), layer.states
    function = mosaic_gpu.ssd_scan if chosen == "mosaic_gpu" else xla.ssd_scan
    return function(layer, tables, chunk_size=chunk_size, z=gate, dt_limits=dt_limits)
