"""Packed queries cut into tiles of one row each, as the "xla" implementations take them, and put back in order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree


class Tiles(NamedTuple):
    """Runs of consecutive queries of one row. Tiles past the last one of the last row hold no queries."""

    row: Int[Array, " tiles"]
    first_token: Int[Array, " tiles"]
    first_position: Int[Array, " tiles"]
    num_queries: Int[Array, " tiles"]


def tile_size_of(tokens: int, rows: int, largest: int) -> int:
    """Twice the average row at most, so that padding at the ends of rows at most doubles the work."""
    average = -(-tokens // rows)
    return min(tokens, largest, max(8, 1 << (average - 1).bit_length()))


def most_tiles(tokens: int, rows: int, tile_size: int) -> int:
    """Returns how many tiles any such rows can be cut into."""
    return min(-(-tokens // tile_size) + rows, tokens)


def _tiles_before(
    cu_q_lens: Int[Array, " row_bounds"], tile_size: int
) -> Int[Array, " row_bounds"]:
    """Counts the tiles of all rows before each row; the last number is the count of all tiles."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tiles_of_row = (q_lens + (tile_size - 1)) // tile_size
    return jnp.pad(jnp.cumsum(tiles_of_row, dtype=jnp.int32), (1, 0))


def _owner(bounds: Int[Array, " row_bounds"], items: int) -> Int[Array, " items"]:
    """Finds the row of each of so many items when row r owns `bounds[r]:bounds[r + 1]`; `rows` when none does."""
    item = jnp.arange(items, dtype=jnp.int32)
    return jnp.sum(bounds[None, 1:] <= item[:, None], axis=1, dtype=jnp.int32)


def cut_tiles(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    tile_size: int,
    num_tiles: int,
) -> Tiles:
    """Cuts each row from its first query on; `seq_lens` are the rows' keys, those of their queries included."""
    before = _tiles_before(cu_q_lens, tile_size)
    row = jnp.minimum(_owner(before, num_tiles), seq_lens.shape[0] - 1)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    first_token = cu_q_lens[row] + (tile - before[row]) * tile_size
    queries_left = cu_q_lens[row + 1] - first_token
    return Tiles(
        row=row,
        first_token=first_token,
        first_position=seq_lens[row] - queries_left,
        num_queries=jnp.clip(queries_left, 0, tile_size),
    )


def unpack_tiles(
    results: PyTree[Array], tokens: int, cu_q_lens: Int[Array, " row_bounds"], tile_size: int
) -> PyTree[Array]:
    """Brings results of `[tiles * tile_size, ...]` back into the order of tokens.

    Tokens that no row owns are sought behind the last row's queries. There is room for them, and it holds what
    tiles give where they have no query.
    """
    row = jnp.minimum(_owner(cu_q_lens, tokens), cu_q_lens.shape[0] - 2)
    token = jnp.arange(tokens, dtype=jnp.int32)
    place = _tiles_before(cu_q_lens, tile_size)[row] * tile_size + token - cu_q_lens[row]
    return jax.tree.map(
        lambda result: result.at[place].get(mode="clip", wrap_negative_indices=False), results
    )
