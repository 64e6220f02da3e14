"""Pieces of work of the `latent_attention` kernel: cutting of packed queries (XLA), and a block's piece (kernel).

A piece is one query, or a few adjacent queries of a row whose heads together fill the 64 rows of a block. A share is a
block's part of the piece's keys, in pairs of tiles.
"""

from collections.abc import Mapping

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.latent_kernel.schedule import SLOTS, TILE, Geometry, Schedule
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.packed import rows as packed_rows

FIELDS = 4
"""Number of int32 fields of a piece: row, first token, number of tokens, number of keys that the first token sees."""


def most_pieces(tokens: int, rows: int, tokens_per_piece: int) -> int:
    """Returns the number of pieces for `tokens` tokens, an upper bound for any lengths of rows and padding."""
    return packed_rows.most_pieces(tokens, rows + 1, tokens_per_piece)


def cut(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    tokens: int,
    tokens_per_piece: int,
) -> Int[Array, "pieces fields"]:
    """Cuts packed queries into pieces, in reverse order: a row's last queries see the most keys and start first.

    Padding tokens form one more row, without keys. This is a few small XLA fusions, shared by all layers of a step.
    """
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    pieces = packed_rows.cut(
        bounds, jnp.zeros_like(bounds[1:]), tokens=tokens, size=tokens_per_piece
    )
    rows = len(seq_lens)
    owned = pieces.row < rows
    row = jnp.minimum(pieces.row, rows - 1)
    tokens_after = cu_q_lens[row + 1] - pieces.start
    keys = jnp.where(owned, seq_lens[row] - tokens_after + 1, 0)
    return jnp.stack([row, pieces.start, pieces.length, keys], axis=1)[::-1]


def lse_of_tokens(
    lse: Float[Array, "pieces blocks height"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    tokens: int,
    heads: int,
) -> Float[Array, "tokens heads"]:
    """Returns the kernel's log-sum-exps, which are in the order of pieces, in the order of tokens and heads."""
    pieces, blocks, height = lse.shape
    per_piece = max(1, height // heads)
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    counts = packed_rows.counts_of(bounds, jnp.zeros_like(bounds[1:]), per_piece)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = packed_rows.owners(bounds[1:], token)
    offset = token - bounds[row]
    piece = (jnp.cumsum(counts, dtype=jnp.int32) - counts)[row] + offset // per_piece
    in_order = lse[::-1].reshape(pieces, blocks * height)
    in_order = in_order[:, : per_piece * heads].reshape(pieces * per_piece, heads)
    return in_order.at[piece * per_piece + offset % per_piece].get(mode="clip")


class Piece:
    """A block's piece, and its share of the keys.

    Attributes:
        token: index of the first token.
        count: number of tokens.
        first_keys: number of keys that the first token sees; each later token sees one more.
        keys: number of keys that the last token sees.
        start: the first pair of tiles of the share.
        clear: the first pair of tiles that needs a mask: some token does not see all of it.
        stop: one past the last pair of tiles.
    """

    def __init__(self, geometry: Geometry, schedule: Schedule, refs: Mapping[str, Ref]) -> None:
        self.index, self.part = lax.axis_index("piece"), lax.axis_index("part")
        self.block = lax.axis_index("block")
        self.rank = lax.axis_index("share") if schedule.cluster > 1 else jnp.int32(0)
        if geometry.packed:
            fields = [refs["pieces"][self.index, field] for field in range(FIELDS)]
            self.row, self.token, self.count, self.first_keys = fields
            self.keys = jnp.where(self.count > 0, self.first_keys + self.count - 1, 0)
            self.keys = jnp.where(self.first_keys > 0, self.keys, 0)
        else:
            self.row = self.token = self.index
            self.count, self.first_keys = jnp.int32(1), refs["seq_lens"][self.row]
            self.keys = self.first_keys
        pairs = pl.cdiv(self.keys, SLOTS * TILE)
        shares, share = schedule.shares, self.part + self.rank
        self.start, self.stop = pairs * share // shares, pairs * (share + 1) // shares
        self.clear = jnp.clip(self.first_keys // (SLOTS * TILE), self.start, self.stop)

    def first_row(self, geometry: Geometry) -> Array:
        """Returns the row of the piece's first token and the block's first head in an array [tokens * heads, ...]."""
        row = self.token * geometry.heads + self.block * WGMMA_ROWS
        return pl.multiple_of(row, ROW_TILE)


def fetch_queries(
    geometry: Geometry, refs: Mapping[str, Ref], piece: Piece, *, interpret: bool
) -> None:
    """Starts the copy of the block's rows of queries; without packing only the piece's own heads are copied."""
    rows = WGMMA_ROWS if geometry.packed else geometry.block_heads
    # `pl.multiple_of` is not supported on a single warp, so the slices are made outside of `on_warps`.
    queries = refs["q"].at[pl.ds(piece.first_row(geometry), rows)]
    tile = refs["q_tile"].at[0, pl.ds(0, rows)]
    on_warps(lambda: plgpu.copy_gmem_to_smem(queries, tile, refs["q_arrived"]), interpret=interpret)
