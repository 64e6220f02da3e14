"""Producer warpgroup of a block in a pair: it gathers half of the records of each tile for both blocks.

Loads of the next tile into registers are in flight while this tile is written. Bytes are decoded before their half of
the tile is free, so that only the stores remain then.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.latent_kernel.kernel import Kernel
from pallas_kernels.latent_kernel.pieces import Piece, fetch_queries
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.sparse_attention import mosaic_pair
from pallas_kernels.sparse_attention.mosaic_exchange import number_of
from pallas_kernels.sparse_attention.mosaic_producer import places_of
from pallas_kernels.sparse_attention.mosaic_records import Rows

Loaded = tuple[Array, Array]


class Ahead(NamedTuple):
    """Loads in flight: the slots of the tile after the next, and the next tile's elements with their scales."""

    found: Array
    lo: Loaded
    hi: Loaded
    rope: Loaded


class PairProducer:
    """The producer warpgroup of one block of a pair."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece
        self.packed = refs["records"].dtype == jnp.uint8
        self.places = places_of(kernel.geometry, packed=self.packed)

    def run(self) -> None:
        """Fetches the queries and the share's tiles."""
        fetch_queries(self.geometry, self.refs, self.piece, interpret=self.kernel.interpret)
        start, stop = SLOTS * self.piece.start, SLOTS * self.piece.stop
        found = self.find(start)
        parts = [self.load(found, part) for part in ("lo", "hi", "rope")]
        ahead = Ahead(self.find(start + 1), *parts)
        lax.fori_loop(start, stop, self.make, ahead)

    def find(self, tile: Array) -> Array:
        """Issues the loads of a tile's slots; past the last tile, those of the last one."""
        piece, refs = self.piece, self.refs
        last = jnp.maximum(SLOTS * piece.stop - 1, 0)
        first = jnp.minimum(tile, last) * TILE
        rows = Rows(refs["records"], refs["slots"], piece.row, first, piece.keys)
        return mosaic_pair.find(rows, piece.block)

    def load(self, found: Array, part: str) -> Loaded:
        """Issues the loads of one part of the records at the found slots."""
        return mosaic_pair.load(self.refs["records"], found, self.places[part])

    def make(self, tile: Array, ahead: Ahead) -> Ahead:
        """Writes a tile from its loaded elements, and issues the loads of the next."""
        slot, found = tile % SLOTS, ahead.found
        numbers = self.decode(ahead.lo)
        self.signal_free("lo", slot)
        self.write("lo", slot, lo=numbers)
        lo = self.load(found, "lo")
        # The decoding below overlaps with the latency of this signal to the other block.
        self.signal_free("hi", slot)
        self.write("hi", slot, rope=ahead.rope[0], hi=self.decode(ahead.hi))
        hi, rope = self.load(found, "hi"), self.load(found, "rope")
        return Ahead(self.find(tile + 2), lo, hi, rope)

    def decode(self, loaded: Loaded) -> Array:
        """Returns loaded elements in the tiles' dtype."""
        return mosaic_pair.decode(*loaded, self.geometry.dtype) if self.packed else loaded[0]

    def signal_free(self, half: str, slot: Array) -> None:
        """Waits until this block's consumers release a half, and signals that to both blocks' producers."""
        plgpu.barrier_wait(self.refs[f"{half}_free"].at[slot])
        plgpu.barrier_arrive(self.refs[f"{half}_free_in_both"].at[slot])

    def write(self, half: str, slot: Array, **parts: Array) -> None:
        """Writes parts of a tile for both blocks, after both have released the half."""
        refs, dtype, block = self.refs, self.geometry.dtype, self.piece.block
        came, barrier = refs["came"], number_of(half, slot)
        plgpu.barrier_wait(refs[f"{half}_free_in_both"].at[slot])
        for part, pieces in parts.items():
            mosaic_pair.store(pieces, refs[part].at[slot], block, dtype)
        columns = self.geometry.half + COLUMN_TILE * ("rope" in parts)
        mosaic_pair.expect(came, barrier, columns)
        plgpu.commit_smem()
        for part in parts:
            mosaic_pair.send(refs[part].at[slot], came, block, barrier, dtype)
        plgpu.barrier_arrive(refs[f"{half}_arrived"].at[slot])
