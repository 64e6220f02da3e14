"""Scatters the results of a scan over pieces: final states and snapshots into the pool, outputs to tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.states import StateTables
from pallas_kernels.packed.rows import Pieces, snapshots_at


def put_states(
    pool: Float[Array, "states ..."],
    places: Int[Array, " values"],
    values: Float[Array, "values ..."],
) -> Float[Array, "states ..."]:
    """Writes each value at its index of the pool; indices past the end are made distinct and dropped."""
    number = jnp.arange(len(places), dtype=jnp.int32)
    places = jnp.where(places < len(pool), places, len(pool) + number)
    return pool.at[places].set(
        values.astype(pool.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def put_pieces(
    pool: Float[Array, "states ..."],
    after: Float[Array, "pieces ..."],
    pieces: Pieces,
    tables: StateTables,
    *,
    chunk_size: int,
) -> Float[Array, "states ..."]:
    """Returns the pool with each row's final state, and with the snapshots at ends of chunks and rows.

    Args:
        pool: the states.
        after: the state after each piece.
        pieces: the rows' pieces, cut at least wherever a chunk ends.
        tables: the rows' bounds and lengths, and the indices of their final states and snapshots.
        chunk_size: tokens of a chunk.
    """
    ends = jnp.where(pieces.last, tables.write_states[pieces.row], len(pool))
    pool = put_states(pool, ends, after)
    if tables.snapshot_ends is None or not len(tables.snapshot_ends):
        return pool
    return put_states(pool, snapshot_of_pieces(pieces, tables, len(pool), chunk_size), after)


def snapshot_of_pieces(
    pieces: Pieces, tables: StateTables, num_states: int, chunk_size: int
) -> Int[Array, " pieces"]:
    """Returns the state to which each piece's final state is snapshotted, `num_states` for none."""
    stop = pieces.start + pieces.length
    position = tables.seq_lens[pieces.row] - (tables.cu_q_lens[pieces.row + 1] - stop)
    known = (pieces.length > 0) & (pieces.last | (position % chunk_size == 0))
    kept = snapshots_at(stop, tables.snapshot_ends, tables.snapshot_states, num_states)
    return jnp.where(known, kept, num_states)


def by_token(
    values: Float[Array, "pieces size ..."],
    pieces: Pieces,
    row: Int[Array, " tokens"],
    place: Int[Array, " tokens"],
    positions: Int[Array, " rows"],
) -> Float[Array, "tokens ..."]:
    """Returns the values of pieces in the order of tokens; padding tokens get an arbitrary value.

    Args:
        values: values of each piece's tokens.
        pieces: pieces of at most `size = values.shape[1]` tokens, cut wherever a position is a multiple of `size`.
        row: each token's row.
        place: each token's index in its row.
        positions: position of each row's first token in its sequence.
    """
    size, count = values.shape[1], len(pieces.row)
    number = jnp.arange(count, dtype=jnp.int32)
    first = (
        jnp.zeros(len(positions), jnp.int32).at[pieces.row].add(jnp.where(pieces.first, number, 0))
    )
    offset = (positions % size)[row] + place
    # A row's first piece starts with the row's first token, at any offset in a chunk.
    inside = jnp.where(offset < size, place, offset % size)
    return values[jnp.minimum(first[row] + offset // size, count - 1), inside]
