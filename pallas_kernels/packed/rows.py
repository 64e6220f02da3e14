"""Cuts packed rows into pieces, each of one row, and maps tokens to rows and snapshots. Small XLA fusions."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Pieces(NamedTuple):
    """Runs of consecutive tokens of one row, in the order of tokens; unused pieces at the end have length 0.

    Attributes:
        row: the piece's row.
        start: index of its first packed token.
        length: number of its tokens.
        first: whether it is the first piece of its row.
        last: whether it is the last piece of its row.
    """

    row: Int[Array, " pieces"]
    start: Int[Array, " pieces"]
    length: Int[Array, " pieces"]
    first: Bool[Array, " pieces"]
    last: Bool[Array, " pieces"]


def most_pieces(tokens: int, rows: int, size: int) -> int:
    """Returns the most pieces that `rows` rows of `tokens` tokens need: each may start and end with a partial one."""
    return max(1, min(tokens, tokens // size + 2 * rows))


def cut(
    cu_q_lens: Int[Array, " row_bounds"],
    positions: Int[Array, " rows"],
    *,
    tokens: int,
    size: int,
) -> Pieces:
    """Cuts rows wherever a position is a multiple of `size`.

    Args:
        cu_q_lens: row r's tokens are `cu_q_lens[r]:cu_q_lens[r + 1]`.
        positions: position of each row's first token in its sequence.
        tokens: number of packed tokens, padding included; it determines the number of pieces in the result.
        size: most tokens of a piece.
    """
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    offset = positions % size
    counts = counts_of(cu_q_lens, positions, size)
    stops = jnp.cumsum(counts, dtype=jnp.int32)
    piece = jnp.arange(most_pieces(tokens, len(lengths), size), dtype=jnp.int32)
    row = owners(stops, piece)
    number = piece - (stops - counts)[row]
    start = jnp.maximum(number * size - offset[row], 0)
    stop = jnp.minimum((number + 1) * size - offset[row], lengths[row])
    real = piece < stops[-1]
    return Pieces(
        row=row,
        start=jnp.where(real, cu_q_lens[row] + start, 0),
        length=jnp.where(real, stop - start, 0),
        first=real & (number == 0),
        last=real & (number == counts[row] - 1),
    )


def counts_of(
    cu_q_lens: Int[Array, " row_bounds"], positions: Int[Array, " rows"], size: int
) -> Int[Array, " rows"]:
    """Returns the number of pieces of each row."""
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    return jnp.where(lengths > 0, (positions % size + lengths + size - 1) // size, 0)


def owners(stops: Int[Array, " rows"], places: Int[Array, " places"]) -> Int[Array, " places"]:
    """Returns the row of each index, given the rows' ends; indices past all rows get the last row.

    It compares all pairs, because `searchsorted` would lower to a loop.
    """
    row = jnp.sum(stops[None, :] <= places[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(row, len(stops) - 1)


def rows_of_tokens(
    cu_q_lens: Int[Array, " row_bounds"], tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Returns the row of each token and its index in that row; the index of padding tokens is -1."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = owners(cu_q_lens[1:], token)
    return row, jnp.where(token < cu_q_lens[-1], token - cu_q_lens[row], -1)


def snapshots_at(
    ends: Int[Array, " places"],
    snapshot_ends: Int[Array, " snapshots"] | None,
    snapshot_states: Int[Array, " snapshots"] | None,
    nowhere: int,
) -> Int[Array, " places"]:
    """Returns the state to which each end is snapshotted; the i-th end without a snapshot gets `nowhere + i`."""
    place = jnp.arange(len(ends), dtype=jnp.int32)
    if snapshot_ends is None or snapshot_states is None or not len(snapshot_ends):
        return nowhere + place
    same = ends[:, None] == snapshot_ends[None, :]
    found = jnp.sum(jnp.where(same, snapshot_states[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(same, axis=1), found, nowhere + place)
