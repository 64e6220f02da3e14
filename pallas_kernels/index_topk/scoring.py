"""Scores of the indexer in plain XLA, tile by tile. Does not know what they are for."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from pallas_kernels.formats.index_keys import split_index_pages
from pallas_kernels.packed.query_tiles import (
    Tiles,
    cut_tiles,
    most_tiles,
    tile_size_of,
    unpack_tiles,
)
from pallas_kernels.packed.rows import rows_of_tokens

LARGEST_TILE = 64
TEMPORARY_BYTES = 1 << 30


class Scored(NamedTuple):
    """The queries of one tile.

    Attributes:
        scores: of all keys in the row's pages; those that a query does not see are anything. None is NaN.
        seen: keys that each query sees, 0 for those of no row.
        page_ids: the row's pages.
    """

    scores: Float[Array, "queries keys"]
    seen: Int[Array, " queries"]
    page_ids: Int[Array, " table_width"]


def visit_tiles(
    visit: Callable[[Scored], PyTree[Array]],
    q: Shaped[Array, "tokens index_heads index_dim"],
    weights: Float[Array, "tokens index_heads"],
    index_pages: Shaped[Array, "pages page_size width"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None,
    *,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> PyTree[Array]:
    """Returns what `visit` makes of each tile's queries, in the order of tokens.

    Where the products of all tiles would take too much memory, tiles take turns.
    """
    tokens, rows = q.shape[0], seq_lens.shape[0]
    # Products, and what a sort needs.
    per_query = page_table.shape[1] * index_pages.shape[1] * 4 * (q.shape[1] + 4)
    most = max(1, temporary_bytes // per_query)
    is_packed = cu_q_lens is not None
    tile_size = tile_size_of(tokens, rows, min(LARGEST_TILE, most)) if is_packed else 1
    tiles = tiles_of(tokens, seq_lens, cu_q_lens, tile_size)

    def score(tile: Tiles) -> PyTree[Array]:
        query = jnp.arange(tile_size, dtype=jnp.int32)
        token = tile.first_token + query
        page_ids = page_table[tile.row]
        scores = _scores(
            q.at[token].get(mode="clip"),
            weights.at[token].get(mode="clip"),
            index_pages.at[page_ids].get(mode="clip", wrap_negative_indices=False),
        )
        seen = jnp.where(query < tile.num_queries, tile.first_position + query + 1, 0)
        return visit(Scored(scores, seen, page_ids))

    batch = max(1, most // tile_size)
    is_whole = batch >= len(tiles.row)
    results = jax.vmap(score)(tiles) if is_whole else lax.map(score, tiles, batch_size=batch)
    results = jax.tree.map(lambda result: result.reshape(-1, *result.shape[2:]), results)
    return results if cu_q_lens is None else unpack_tiles(results, tokens, cu_q_lens, tile_size)


def tiles_of(
    tokens: int,
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None,
    tile_size: int,
) -> Tiles:
    """Returns the tiles of packed queries, or one for each row where each has one query."""
    if cu_q_lens is None:
        token = jnp.arange(len(seq_lens), dtype=jnp.int32)
        return Tiles(token, token, seq_lens - 1, jnp.minimum(seq_lens, 1))
    count = most_tiles(tokens, len(seq_lens), tile_size)
    return cut_tiles(seq_lens, cu_q_lens, tile_size, count)


def rows_and_seen(
    tokens: int, seq_lens: Int[Array, " rows"], cu_q_lens: Int[Array, " row_bounds"] | None
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Returns each query's row and the keys that it sees, 0 for queries of no row."""
    if cu_q_lens is None:
        return jnp.arange(tokens, dtype=jnp.int32), seq_lens
    row, place = rows_of_tokens(cu_q_lens, tokens)
    before = seq_lens[row] - (cu_q_lens[row + 1] - cu_q_lens[row])
    return row, jnp.where(place >= 0, before + place + 1, 0)


def _scores(
    q: Shaped[Array, "queries index_heads index_dim"],
    weights: Float[Array, "queries index_heads"],
    pages: Shaped[Array, "pages page_size width"],
) -> Float[Array, "queries keys"]:
    """Returns the sums over heads; a key's scale, which is positive, is multiplied in at the end. NaN becomes +inf."""
    is_bytes = pages.dtype == jnp.uint8
    numbers, scales = split_index_pages(pages) if is_bytes else (pages, None)
    numbers = numbers.reshape(-1, q.shape[-1])
    # Numbers of 8 bits are exact in bfloat16.
    dtype = jnp.float32 if jnp.float32 in (q.dtype, numbers.dtype) else jnp.bfloat16
    multiply = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    # Else XLA sees that both were of 8 bits, and multiplies these, which keeps some 14 bits of the sums.
    wide = lax.optimization_barrier(q.astype(dtype))
    products = multiply("qhd,cd->qhc", wide, numbers.astype(dtype))
    sums = multiply("qh,qhc->qc", weights, jnp.maximum(products, 0.0))
    scores = sums if scales is None else sums * scales.reshape(1, -1)
    return jnp.where(jnp.isnan(scores), jnp.inf, scores)
