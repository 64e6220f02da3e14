"""Attention of packed queries in plain XLA: cuts packed queries into tiles of one row each and computes tile by tile.

A small step is a single batch of tiles. A large one loops over batches, each with enough queries for an efficient
product, and within a batch over as many blocks of keys as it needs. Both loops bound the temporary memory.

Under the fixed order of sums every query is a batch of its own, and visits the same blocks of keys in every step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.packed.query_tiles import (
    Tiles,
    cut_tiles,
    most_tiles,
    tile_size_of,
    unpack_tiles,
)
from pallas_kernels.packed.tile_attention import QueryTiles, attend_tiles, pools_of

LARGEST_TILE = 512
TEMPORARY_BYTES = 256 << 20


def prefill_attention(
    arrays: AttentionArrays,
    options: ScoreOptions,
    *,
    temporary_bytes: int = TEMPORARY_BYTES,
    largest_tile: int = LARGEST_TILE,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Returns output in q's dtype and float32 log-sum-exp; arguments as in `ragged_attention`."""
    q, seq_lens, cu_q_lens = arrays.q, arrays.seq_lens, arrays.cu_q_lens
    assert cu_q_lens is not None
    tokens, rows = q.shape[0], seq_lens.shape[0]
    tile_size = 1 if is_fixed() else tile_size_of(tokens, rows, largest_tile)
    num_tiles = most_tiles(tokens, rows, tile_size)
    batch = 1 if is_fixed() else min(num_tiles, max(1, largest_tile // tile_size))
    num_batches = -(-num_tiles // batch)
    tiles = cut_tiles(seq_lens, cu_q_lens, tile_size, num_batches * batch)

    def attend(tiles: Tiles) -> tuple[Array, Array]:
        token = tiles.first_token[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None, :]
        queries = QueryTiles(
            q.at[token].get(mode="clip", wrap_negative_indices=False),
            arrays.page_table[tiles.row],
            tiles.first_position,
            tiles.num_queries,
        )
        out, lse = attend_tiles(
            queries, pools_of(arrays), arrays.sinks, options, temporary_bytes=temporary_bytes
        )
        return out.astype(q.dtype), lse

    if num_batches == 1:
        out, lse = attend(tiles)
    else:
        batches = jax.tree.map(lambda field: field.reshape(num_batches, batch), tiles)
        out, lse = jax.lax.map(attend, batches)
    flat = out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])
    return unpack_tiles(flat, tokens, cu_q_lens, tile_size)
