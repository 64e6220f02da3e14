"""Public entry point of `delta_scan`: the recurrence of a gated delta layer over packed rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.delta import DeltaArrays, check_delta
from pallas_kernels.arguments.states import StateTables, check_scan
from pallas_kernels.delta_scan import mosaic_gpu, xla
from pallas_kernels.dispatch import choose


def delta_scan(
    a_log: Shaped[Array | np.ndarray, " heads"],
    dt_bias: Shaped[Array | np.ndarray, " decays"],
    states: Float[Array, "states heads key_dim value_dim"],
    qkv: Shaped[Array | np.ndarray, "tokens wide"],
    a: Shaped[Array | np.ndarray, "tokens decays"],
    b: Shaped[Array | np.ndarray, "tokens heads"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    snapshot_ends: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    snapshot_states: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    *,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Computes the gated delta rule over each row's tokens (Gated DeltaNet, arXiv:2412.06464).

    With L2-normalised queries q and keys k, q scaled by `key_dim ** -0.5`, and `step = softplus(a + dt_bias)`, for each
    head: `state = exp(-exp(a_log) * step) * state`, then `state += outer(k, sigmoid(b) * (v - k @ state))` and
    `out = q @ state`.

    With `heads * key_dim` decays in place of `heads`, each row of a head's state has its own step and so its own factor
    (Kimi Delta Attention, arXiv:2510.26692).

    Rows are cut into chunks where a position, counted from token 0 of the sequence, is a multiple of `chunk_size`. So
    with float32 states a sequence that is split into calls at such multiples gives the same bits as one that is not;
    other splits, and states of 16 bits, which are rounded between calls, agree up to rounding. A row reads its state
    before it writes one, so both may be the same. Rows without tokens change nothing. In one call, no state may be read
    by one row and written by another, and a snapshot's state must not be used otherwise; this is checked for concrete
    ids.

    Args:
        a_log: logarithm of each head's decay rate.
        dt_bias: bias of a; `decays` is `heads` or `heads * key_dim`, head by head.
        states: the pool of states, floating, usually float32. Donate it for an update in place.
        qkv: result of `causal_conv`: each token's queries of all key heads, then keys, then values of all heads.
            Padding tokens may hold any value.
        a: each token's steps, before bias and softplus.
        b: each token's strength of correction per head, before the sigmoid.
        cu_q_lens: int32 bounds: row r's tokens are `qkv[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
        seq_lens: int32 number of tokens of each row, including those before this call; 0 for a padding row.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row; an id past the end writes nothing.
        snapshot_ends: int32, ascending: for each snapshot the number of packed tokens before it. Only ends of chunks
            and of rows are available; others are ignored.
        snapshot_states: int32 state that each snapshot is written to; an id past the end writes nothing.
        chunk_size: tokens of a chunk.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The outputs in qkv's dtype, zeros for padding tokens; and the updated pool.

    Raises:
        ValueError: shapes, dtypes, options or concrete ids do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    check_delta(a_log, dt_bias, states, qkv, a, b)
    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    sizes = {"num_states": states.shape[0], "tokens": qkv.shape[0], "chunk_size": chunk_size}
    check_scan(*of_rows, **sizes)
    given = (a_log, dt_bias, states, qkv, a, b)
    # `None` is an empty pytree, so absent tables stay `None`.
    given, of_rows = jax.tree.map(jnp.asarray, (given, of_rows))
    layer, tables = DeltaArrays(*given), StateTables(*of_rows)
    refuses = partial(mosaic_gpu.why_not, layer.states, layer.qkv, chunk_size=chunk_size)
    reasons = {"mosaic_gpu": lambda: layer.refusal() or refuses(), "xla": lambda: None}
    chosen = choose("delta_scan", reasons, implementation)
    if not qkv.shape[0] or not len(read_states):
        shape = (qkv.shape[0], states.shape[1], states.shape[3])
        return jnp.zeros(shape, qkv.dtype), layer.states
    function = mosaic_gpu.delta_scan if chosen == "mosaic_gpu" else xla.delta_scan
    return function(layer, tables, chunk_size=chunk_size)
