"""Pieces of work of the `latent_attention` kernel: how packed queries are cut, and what a block makes of its piece.

A piece is one query, or a few neighbouring ones of a row that fill the 64 rows of a block between them. A share is a
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
"""Numbers that describe a piece: its row, first token, tokens, and the keys that its first token sees."""


def most_pieces(tokens: int, rows: int, tokens_per_piece: int) -> int:
    """Returns how many pieces any rows of so many tokens are cut into, those of tokens of no row included."""
    return packed_rows.most_pieces(tokens, rows + 1, tokens_per_piece)


def cut(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    tokens: int,
    tokens_per_piece: int,
) -> Int[Array, "pieces fields"]:
    """Cuts packed queries into pieces, a row's last ones first: they have most keys, and should not end last.

    Tokens that no row owns are one more row, of no keys. A few small fusions, which the layers of a step share.
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
    """Brings what the kernel wrote piece by piece into the order of tokens and heads."""
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
        token: the first token.
        count: its tokens.
        first_keys: keys that the first token sees; each later one sees one more.
        keys: keys that the last token sees.
        start: the first pair of tiles of the share.
        clear: the first pair of which some token does not see every key.
        stop: the pair after the last one.
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
        """Returns where the piece's first token and the block's first head are among all tokens' heads."""
        row = self.token * geometry.heads + self.block * WGMMA_ROWS
        return pl.multiple_of(row, ROW_TILE)


def fetch_queries(
    geometry: Geometry, refs: Mapping[str, Ref], piece: Piece, *, interpret: bool
) -> None:
    """Starts the copy of the block's rows of queries; a row with one query copies no others."""
    rows = WGMMA_ROWS if geometry.packed else geometry.block_heads
    # A single warp cannot compute what is known to be a multiple, so the places are computed outside.
    queries = refs["q"].at[pl.ds(piece.first_row(geometry), rows)]
    tile = refs["q_tile"].at[0, pl.ds(0, rows)]
    on_warps(lambda: plgpu.copy_gmem_to_smem(queries, tile, refs["q_arrived"]), interpret=interpret)
