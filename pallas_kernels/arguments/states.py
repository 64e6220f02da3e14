"""Refuses wrong tables of recurrent states at an op's door. Knows no implementation."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from pallas_kernels.arguments.checks import check_ids

Table = Array | np.ndarray


def check_states(
    num_states: int,
    read_states: Table,
    write_states: Table,
    snapshot_ends: Table | None = None,
    snapshot_states: Table | None = None,
) -> None:
    """Refuses tables whose shapes or dtypes are wrong and, where their values are known, ids that would race.

    One call reads all states that rows start from while it writes those that they end in, in any order; so
    nothing that one row reads may be written for another.

    Raises:
        ValueError: what was got, what was wanted.
    """
    check_ids("read_states", read_states, (None,))
    rows = read_states.shape[0]
    check_ids("write_states", write_states, (rows,))
    if (snapshot_ends is None) != (snapshot_states is None):
        raise ValueError(
            "snapshot_ends and snapshot_states come together, got only one; give both or none"
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
                f"write_states names state {state} for rows {writer[state]} and {row}; each row "
                "needs a state of its own"
            )
        writer[int(state)] = row
    for row, state in enumerate(read):
        if writer.get(int(state), row) != row:
            raise ValueError(
                f"row {row} reads state {state}, which row {writer[int(state)]} writes in the same "
                "call; write it elsewhere, or in a later call"
            )
    taken = {int(state) for state in read if state < num_states} | set(writer)
    for state in () if snapshots is None else snapshots:
        if state < num_states and int(state) in taken:
            raise ValueError(
                f"snapshot_states names state {state}, which this call reads or writes for "
                "something else; a snapshot needs a state of its own"
            )
        taken.add(int(state))


def _check_order(num_states: int, ends: np.ndarray, states: np.ndarray) -> None:
    real = ends[states < num_states].astype(np.int64)
    if (np.diff(real) <= 0).any():
        raise ValueError(
            f"snapshot_ends must increase from one snapshot to the next, got {real.tolist()}"
        )


def check_bounds(cu_q_lens: Table, rows: int, tokens: int) -> None:
    """Refuses bounds of packed rows that are not `rows + 1` rising numbers up to `tokens`."""
    check_ids("cu_q_lens", cu_q_lens, (rows + 1,))
    if isinstance(cu_q_lens, Tracer):
        return
    bounds = np.asarray(cu_q_lens).astype(np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > tokens:
        raise ValueError(
            f"cu_q_lens must rise from 0 to at most {tokens} tokens, got {bounds.tolist()}"
        )


def check_floats(**arrays: Table | None) -> None:
    """Refuses arrays that are not floating."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got {array.dtype}")
