"""The index tables of ops with recurrent states, and their checks, which raise `ValueError`."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from pallas_kernels.arguments.checks import check_ids

Table = Array | np.ndarray


class StateTables(NamedTuple):
    """The tables of a scan over packed rows, described in the ops' `api.py`; without snapshots the last are `None`."""

    cu_q_lens: Int[Array, " row_bounds"]
    seq_lens: Int[Array, " rows"]
    read_states: Int[Array, " rows"]
    write_states: Int[Array, " rows"]
    snapshot_ends: Int[Array, " snapshots"] | None = None
    snapshot_states: Int[Array, " snapshots"] | None = None


def check_states(
    num_states: int,
    read_states: Table,
    write_states: Table,
    snapshot_ends: Table | None = None,
    snapshot_states: Table | None = None,
) -> None:
    """Checks shapes and dtypes of state tables and, for concrete arrays, that no two rows race on a state.

    A kernel reads the rows' initial states and writes their final states and snapshots in any order. So a state that
    one row reads must not be written for another row, and no state may be written twice.

    Args:
        num_states: states in the pool; ids from there on are padding.
        read_states: int32 [rows], the state that each row starts from.
        write_states: int32 [rows], the state that each row ends in.
        snapshot_ends: int32 [snapshots], number of packed tokens before each snapshot, ascending; or `None`.
        snapshot_states: int32 [snapshots], the state that each snapshot is written to; `None` with `snapshot_ends`.

    Raises:
        ValueError: a table has the wrong shape or dtype, names a state twice, or its snapshots do not ascend.
    """
    check_ids("read_states", read_states, (None,))
    rows = read_states.shape[0]
    check_ids("write_states", write_states, (rows,))
    if (snapshot_ends is None) != (snapshot_states is None):
        raise ValueError(
            "snapshot_ends and snapshot_states belong together, got only one; give both or neither"
        )
    tables = [read_states, write_states]
    if snapshot_ends is not None and snapshot_states is not None:
        check_ids("snapshot_ends", snapshot_ends, (None,))
        check_ids("snapshot_states", snapshot_states, tuple(snapshot_ends.shape))
        tables += [snapshot_ends, snapshot_states]
    if any(isinstance(table, Tracer) for table in tables):
        return
    known = [np.asarray(table) for table in tables]
    _check_hazards(num_states, known[0], known[1], known[3] if len(known) == 4 else None)
    if len(known) == 4:
        _check_order(num_states, known[2], known[3])


def _check_hazards(
    num_states: int, read: np.ndarray, write: np.ndarray, snapshots: np.ndarray | None
) -> None:
    writer: dict[int, int] = {}
    for row, state in enumerate(write):
        if state >= num_states:
            continue
        if state in writer:
            raise ValueError(
                f"write_states names state {state} for rows {writer[state]} and {row}; give each row "
                "its own state"
            )
        writer[int(state)] = row
    for row, state in enumerate(read):
        if writer.get(int(state), row) != row:
            raise ValueError(
                f"row {row} reads state {state}, which row {writer[int(state)]} writes in the same "
                "call; write another state, or write it in a later call"
            )
    taken = {int(state) for state in read if state < num_states} | set(writer)
    for state in () if snapshots is None else snapshots:
        if state < num_states and int(state) in taken:
            raise ValueError(
                f"snapshot_states names state {state}, which this call also reads or writes; give each "
                "snapshot its own state"
            )
        taken.add(int(state))


def _check_order(num_states: int, ends: np.ndarray, states: np.ndarray) -> None:
    real = ends[states < num_states].astype(np.int64)
    if (np.diff(real) <= 0).any():
        raise ValueError(
            f"snapshot_ends must increase from one snapshot to the next, got {real.tolist()}"
        )


def check_bounds(cu_q_lens: Table, rows: int, tokens: int) -> None:
    """Raises `ValueError` unless `cu_q_lens` is int32 [rows + 1] and, if concrete, rises from 0 to at most `tokens`."""
    check_ids("cu_q_lens", cu_q_lens, (rows + 1,))
    if isinstance(cu_q_lens, Tracer):
        return
    bounds = np.asarray(cu_q_lens).astype(np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > tokens:
        raise ValueError(
            f"cu_q_lens must rise from 0 to at most {tokens} tokens, got {bounds.tolist()}"
        )


def check_scan(
    cu_q_lens: Table,
    seq_lens: Table,
    read_states: Table,
    write_states: Table,
    snapshot_ends: Table | None,
    snapshot_states: Table | None,
    *,
    num_states: int,
    tokens: int,
    chunk_size: int,
) -> None:
    """Raises `ValueError` for the tables of a scan that fit neither each other nor `tokens` packed tokens."""
    check_states(num_states, read_states, write_states, snapshot_ends, snapshot_states)
    check_ids("seq_lens", seq_lens, tuple(read_states.shape))
    check_bounds(cu_q_lens, read_states.shape[0], tokens)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def check_floats(**arrays: Table | None) -> None:
    """Raises `ValueError` for arrays, given by name, whose dtype is not floating; `None` is skipped."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must have a floating dtype, got {array.dtype}")
