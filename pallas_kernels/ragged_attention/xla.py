"""`ragged_attention` in plain XLA: cuts packed queries into tiles of one row each and attends tile by tile.

A small step is one piece. A large one loops over batches of tiles, each as many queries as a matmul wants,
and inside over blocks of keys, as many as the batch needs; both bound the temporary memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.tile_attention import attend_tiles

LARGEST_TILE = 512
TEMPORARY_BYTES = 256 << 20


class Tiles(NamedTuple):
    """Runs of consecutive queries of one row. Tiles past the last one of the last row hold no queries."""

    row: Int[Array, " tiles"]
    first_token: Int[Array, " tiles"]
    first_position: Int[Array, " tiles"]
    num_queries: Int[Array, " tiles"]


def ragged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    temporary_bytes: int = TEMPORARY_BYTES,
    largest_tile: int = LARGEST_TILE,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Returns the output in q's dtype and the log-sum-exp in float32."""
    tokens, rows = q.shape[0], seq_lens.shape[0]
    tile_size = _tile_size(tokens, rows, largest_tile)
    num_tiles = min(-(-tokens // tile_size) + rows, tokens)
    batch = min(num_tiles, max(1, largest_tile // tile_size))
    num_batches = -(-num_tiles // batch)
    tiles = _cut(seq_lens, cu_q_lens, tile_size, num_batches * batch)

    def attend(tiles: Tiles) -> tuple[Array, Array]:
        token = tiles.first_token[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None, :]
        out, lse = attend_tiles(
            q.at[token].get(mode="clip", wrap_negative_indices=False),
            k_pages,
            v_pages,
            page_table[tiles.row],
            tiles.first_position,
            tiles.num_queries,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scales=k_scales,
            v_scales=v_scales,
            temporary_bytes=temporary_bytes,
        )
        return out.astype(q.dtype), lse

    if num_batches == 1:
        out, lse = attend(tiles)
    else:
        batches = jax.tree.map(lambda field: field.reshape(num_batches, batch), tiles)
        out, lse = jax.lax.map(attend, batches)
    return _unpack(out, lse, tokens, cu_q_lens, tile_size)


def _tile_size(tokens: int, rows: int, largest: int) -> int:
    """Twice the average row at most, so that padding at the ends of rows at most doubles the work."""
    average = -(-tokens // rows)
    return min(tokens, largest, max(8, 1 << (average - 1).bit_length()))


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


def _cut(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    tile_size: int,
    num_tiles: int,
) -> Tiles:
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


def _unpack(
    out: Array, lse: Array, tokens: int, cu_q_lens: Array, tile_size: int
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Brings tiles back into the order of tokens.

    Tokens that no row owns are sought behind the last row's queries. There is room for them, and it holds what
    tiles give where they have no query: zeros and `-inf`.
    """
    row = jnp.minimum(_owner(cu_q_lens, tokens), cu_q_lens.shape[0] - 2)
    token = jnp.arange(tokens, dtype=jnp.int32)
    place = _tiles_before(cu_q_lens, tile_size)[row] * tile_size + token - cu_q_lens[row]
    heads, head_dim = out.shape[-2:]
    out, lse = out.reshape(-1, heads, head_dim), lse.reshape(-1, heads)
    return (
        out.at[place].get(mode="clip", wrap_negative_indices=False),
        lse.at[place].get(mode="clip", wrap_negative_indices=False),
    )
