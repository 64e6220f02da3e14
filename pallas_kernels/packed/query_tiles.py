"""Cuts packed queries into fixed-size tiles, each of one row, for the "xla" implementations, and unpacks results."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree


class Tiles(NamedTuple):
    """Runs of consecutive queries of one row; unused tiles at the end have no queries."""

    row: Int[Array, " tiles"]
    first_token: Int[Array, " tiles"]
    first_position: Int[Array, " tiles"]
    num_queries: Int[Array, " tiles"]


def tile_size_of(tokens: int, rows: int, largest: int) -> int:
    """Returns the average row length, rounded up to a power of two within [8, largest].

    So padding at the ends of rows at most doubles the work.
    """
    average = -(-tokens // rows)
    return min(tokens, largest, max(8, 1 << (average - 1).bit_length()))


def most_tiles(tokens: int, rows: int, tile_size: int) -> int:
    """Returns the most tiles that `rows` rows of `tokens` tokens in total can need, for any lengths."""
    return min(-(-tokens // tile_size) + rows, tokens)


def _tiles_before(
    cu_q_lens: Int[Array, " row_bounds"], tile_size: int
) -> Int[Array, " row_bounds"]:
    """Returns the exclusive prefix sum of tiles per row; its last element is the total."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tiles_of_row = (q_lens + (tile_size - 1)) // tile_size
    return jnp.pad(jnp.cumsum(tiles_of_row, dtype=jnp.int32), (1, 0))


def _owner(bounds: Int[Array, " row_bounds"], items: int) -> Int[Array, " items"]:
    """Returns the row of each item, where row r owns items `bounds[r]:bounds[r + 1]`; `rows` for items of no row."""
    item = jnp.arange(items, dtype=jnp.int32)
    return jnp.sum(bounds[None, 1:] <= item[:, None], axis=1, dtype=jnp.int32)


def cut_tiles(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    tile_size: int,
    num_tiles: int,
) -> Tiles:
    """Cuts each row into tiles, starting at its first query.

    `seq_lens` counts each row's keys, including those of its queries.
    """
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
    """Returns results of shape `[tiles * tile_size, ...]` in the order of the packed tokens.

    Padding tokens get the results of tile entries that hold no query, after the last row's queries.
    """
    row = jnp.minimum(_owner(cu_q_lens, tokens), cu_q_lens.shape[0] - 2)
    token = jnp.arange(tokens, dtype=jnp.int32)
    place = _tiles_before(cu_q_lens, tile_size)[row] * tile_size + token - cu_q_lens[row]
    return jax.tree.map(
        lambda result: result.at[place].get(mode="clip", wrap_negative_indices=False), results
    )
