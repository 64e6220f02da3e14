"""The door to `ssd_scan`: the recurrence of a Mamba-2 layer over packed rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_ids
from pallas_kernels.arguments.ssd import check_layer
from pallas_kernels.arguments.states import check_bounds, check_states
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
    """Steps each row's state through its tokens and reads an output from it at each (Mamba-2, arXiv:2405.21060).

    With step = clip(softplus(dt + dt_bias), *dt_limits), head by head:
    `state = exp(-exp(a_log) * step) * state + step * outer(x, B)` and `out = state @ C + d * x`.

    Rows are cut where a position is a multiple of `chunk_size`, counted from token 0 of the sequence, and chunks are
    matrix products. So a run that is split at such multiples has the same bits as one that is not; other splits agree
    up to rounding. A row reads its state before it writes one, so that both may be the same. Rows without tokens
    change nothing. In one call no state may be read by one row and written by another, and a snapshot's state belongs
    to it alone; that is checked where ids are known.

    Args:
        a_log: log of the rate at which each head forgets.
        d: what each head adds of its input to its output.
        dt_bias: added to dt.
        states: the pool of states, floating, usually float32 whatever xbc is. Donate it: it is written in place.
        xbc: what `causal_conv` gives: each token's x of all heads, then B of all groups, then C. Head h reads group
            `h // (heads // groups)`. Tokens of no row may hold anything.
        dt: each token's step per head, before bias and softplus.
        cu_q_lens: int32; row r's tokens are `xbc[cu_q_lens[r]:cu_q_lens[r + 1]]`, the row's last positions.
        seq_lens: int32 tokens of each row, those before this call included; 0 for a padding row.
        read_states: int32 state that each row starts from; one past the end reads zeros.
        write_states: int32 state that each row ends in; one past the end writes nothing.
        snapshot_ends: int32 packed tokens, rising; the state before each is kept. Only those before which a chunk
            or a row ends are known; others keep nothing.
        snapshot_states: int32 state that each of these is kept in; one past the end writes nothing.
        chunk_size: tokens of a chunk, the model's.
        z: gate of each output, which is multiplied by silu(z); `None` for none.
        dt_limits: least and greatest step.
        implementation: "mosaic_gpu", "xla", or `None` for the best that can run.

    Returns:
        The outputs in xbc's dtype, zeros for tokens of no row; and the pool.

    Raises:
        ValueError: shapes, dtypes, options or known ids do not fit.
        Unsupported: the implementation asked for, or every one, cannot run; the message carries each reason.
    """
    check_layer(a_log, d, dt_bias, states, xbc, dt, z, dt_limits)
    check_states(states.shape[0], read_states, write_states, snapshot_ends, snapshot_states)
    check_ids("seq_lens", seq_lens, tuple(read_states.shape))
    check_bounds(cu_q_lens, read_states.shape[0], xbc.shape[0])
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    layer = (a_log, d, dt_bias, states, xbc, dt)
    tables = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    # To JAX `None` is a tree without leaves.
    arrays, gate = jax.tree.map(jnp.asarray, ((*layer, *tables), z))
    refuses = partial(mosaic_gpu.why_not, arrays[3], arrays[4], chunk_size=chunk_size)
    reasons = {"mosaic_gpu": refuses, "xla": lambda: None}
    chosen = choose("ssd_scan", reasons, implementation)
    if not xbc.shape[0] or not len(read_states):
        return jnp.zeros((xbc.shape[0], *states.shape[1:3]), xbc.dtype), arrays[3]
    function = mosaic_gpu.ssd_scan if chosen == "mosaic_gpu" else xla.ssd_scan
    return function(*arrays, chunk_size=chunk_size, z=gate, dt_limits=dt_limits)
