"""Scores of the indexer in plain XLA, tile by tile."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped

from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.index_keys import split_index_pages
from pallas_kernels.index_topk.arguments import IndexArrays
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
    """Scores of the queries of one tile.

    Attributes:
        scores: scores of all keys in the row's pages, without NaN; those of keys that a query does not see are
            undefined.
        seen: number of keys that each query sees, 0 for padding.
        page_ids: page ids of the row.
    """

    scores: Float[Array, "queries keys"]
    seen: Int[Array, " queries"]
    page_ids: Int[Array, " table_width"]


def visit_tiles(
    visit: Callable[[Scored], PyTree[Array]],
    arrays: IndexArrays,
    *,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> PyTree[Array]:
    """Returns the results of `visit` on each tile's scores, in the order of tokens.

    If the products of all tiles would take more than `temporary_bytes`, tiles are processed in batches.
    """
    q, weights, index_pages, page_table, seq_lens, cu_q_lens = arrays
    tokens, rows = q.shape[0], seq_lens.shape[0]
    # Bytes of the products, and of a sort.
    per_query = arrays.capacity * 4 * (q.shape[1] + 4)
    most = max(1, temporary_bytes // per_query)
    is_packed = cu_q_lens is not None
    largest = 1 if is_fixed() else min(LARGEST_TILE, most)
    tile_size = tile_size_of(tokens, rows, largest) if is_packed else 1
    tiles = tiles_of(tokens, seq_lens, cu_q_lens, tile_size)

    def score(tile: Tiles) -> PyTree[Array]:
        query = jnp.arange(tile_size, dtype=jnp.int32)
        token = tile.first_token + query
        page_ids = page_table[tile.row]
        queries = q.at[token].get(mode="clip"), weights.at[token].get(mode="clip")
        pages = index_pages.at[page_ids].get(mode="clip", wrap_negative_indices=False)
        if is_fixed():
            # Page by page, so that no score depends on the width of the table.
            found = lax.map(lambda page: _scores(*queries, page[None]), pages)
            scores = found.transpose(1, 0, 2).reshape(tile_size, -1)
        else:
            scores = _scores(*queries, pages)
        seen = jnp.where(query < tile.num_queries, tile.first_position + query + 1, 0)
        return visit(Scored(scores, seen, page_ids))

    batch = max(1, most // tile_size)
    is_whole = batch >= len(tiles.row)
    if is_fixed():
        results = lax.map(score, tiles)
    else:
        results = jax.vmap(score)(tiles) if is_whole else lax.map(score, tiles, batch_size=batch)
    results = jax.tree.map(lambda result: result.reshape(-1, *result.shape[2:]), results)
    return results if cu_q_lens is None else unpack_tiles(results, tokens, cu_q_lens, tile_size)


def tiles_of(
    tokens: int,
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None,
    tile_size: int,
) -> Tiles:
    """Returns the tiles of packed queries, or without `cu_q_lens` one tile per row."""
    if cu_q_lens is None:
        token = jnp.arange(len(seq_lens), dtype=jnp.int32)
        return Tiles(token, token, seq_lens - 1, jnp.minimum(seq_lens, 1))
    count = most_tiles(tokens, len(seq_lens), tile_size)
    return cut_tiles(seq_lens, cu_q_lens, tile_size, count)


def rows_and_seen(
    tokens: int, seq_lens: Int[Array, " rows"], cu_q_lens: Int[Array, " row_bounds"] | None
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Returns each query's row and the number of keys that it sees, 0 for padding."""
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
    """Returns the scores, with NaN as +inf; a key's scale, which is positive, is multiplied in after the sum."""
    is_bytes = pages.dtype == jnp.uint8
    numbers, scales = split_index_pages(pages) if is_bytes else (pages, None)
    numbers = numbers.reshape(-1, q.shape[-1])
    # float8 values are exact in bfloat16.
    dtype = jnp.float32 if jnp.float32 in (q.dtype, numbers.dtype) else jnp.bfloat16
    multiply = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    # Without the barrier XLA sees that both operands were float8 and multiplies those, which keeps some 14 bits of the
    # sums.
    wide = lax.optimization_barrier(q.astype(dtype))
    products = multiply("qhd,cd->qhc", wide, numbers.astype(dtype))
    sums = multiply("qh,qhc->qc", weights, jnp.maximum(products, 0.0))
    scores = sums if scales is None else sums * scales.reshape(1, -1)
    return jnp.where(jnp.isnan(scores), jnp.inf, scores)
