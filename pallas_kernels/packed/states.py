"""Writes states into their pool, those of a scan's pieces among them. Knows no recurrence."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.packed.rows import Pieces, snapshots_at


def put_states(
    pool: Float[Array, "states ..."],
    places: Int[Array, " values"],
    values: Float[Array, "values ..."],
) -> Float[Array, "states ..."]:
    """Writes each value that has a place in the pool; the others get distinct ones past the end, and are dropped."""
    number = jnp.arange(len(places), dtype=jnp.int32)
    places = jnp.where(places < len(pool), places, len(pool) + number)
    return pool.at[places].set(
        values.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def put_pieces(
    pool: Float[Array, "states ..."],
    after: Float[Array, "pieces ..."],
    pieces: Pieces,
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None,
    snapshot_states: Int[Array, " snapshots"] | None,
    *,
    chunk_size: int,
) -> Float[Array, "states ..."]:
    """Writes where each row ends, and what snapshots ask for at the ends of chunks and rows.

    Args:
        pool: the states; its successor is returned.
        after: the state after each piece.
        pieces: cut at least wherever a chunk ends.
        cu_q_lens: as the scans take them, like the tables that follow.
        seq_lens: tokens of each row, those before the call included.
        write_states: where each row ends.
        snapshot_ends: packed tokens before which a state is asked for.
        snapshot_states: where each of these is kept.
        chunk_size: tokens of a chunk.
    """
    pool = put_states(pool, jnp.where(pieces.last, write_states[pieces.row], len(pool)), after)
    if snapshot_ends is None or not len(snapshot_ends):
        return pool
    stop = pieces.start + pieces.length
    position = seq_lens[pieces.row] - (cu_q_lens[pieces.row + 1] - stop)
    known = (pieces.length > 0) & (pieces.last | (position % chunk_size == 0))
    kept = snapshots_at(stop, snapshot_ends, snapshot_states, len(pool))
    return put_states(pool, jnp.where(known, kept, len(pool)), after)


def by_token(
    values: Float[Array, "pieces size ..."],
    pieces: Pieces,
    row: Int[Array, " tokens"],
    place: Int[Array, " tokens"],
    positions: Int[Array, " rows"],
) -> Float[Array, "tokens ..."]:
    """Returns each token's value; any one for tokens of no row.

    Args:
        values: of the tokens of each piece.
        pieces: of `values.shape[1]` tokens at most, cut wherever a position is a multiple of that.
        row: each token's row.
        place: each token's place in its row.
        positions: of each row's first token in its sequence.
    """
    size, count = values.shape[1], len(pieces.row)
    number = jnp.arange(count, dtype=jnp.int32)
    first = (
        jnp.zeros(len(positions), jnp.int32).at[pieces.row].add(jnp.where(pieces.first, number, 0))
    )
    offset = (positions % size)[row] + place
    # A row's first piece begins with its first token, wherever in a chunk that is.
    inside = jnp.where(offset < size, place, offset % size)
    return values[jnp.minimum(first[row] + offset // size, count - 1), inside]
