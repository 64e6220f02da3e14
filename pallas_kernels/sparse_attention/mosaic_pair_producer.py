"""The producer of a block in a pair: it gathers half of the records of each tile for both blocks.

Numbers of the next tile are on their way into registers while this one's are written. Bytes are decoded before the
half is free that they are for, so that what is left to do then is to write them.
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
    """What is on its way: the slots of the tile after the next, and the next one's numbers with their scales."""

    found: Array
    lo: Loaded
    hi: Loaded
    rope: Loaded


class Sharer:
    """The warpgroup that gathers for both blocks of a pair."""

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
        """Starts loading the slots of a tile's records, or the last one's again."""
        piece, refs = self.piece, self.refs
        last = jnp.maximum(SLOTS * piece.stop - 1, 0)
        first = jnp.minimum(tile, last) * TILE
        rows = Rows(refs["records"], refs["slots"], piece.row, first, piece.keys)
        return mosaic_pair.find(rows, piece.block)

    def load(self, found: Array, part: str) -> Loaded:
        """Starts loading one part of the records that were found."""
        return mosaic_pair.load(self.refs["records"], found, self.places[part])

    def make(self, tile: Array, ahead: Ahead) -> Ahead:
        """Makes a tile of what was loaded, and starts loading the next."""
        slot, found = tile % SLOTS, ahead.found
        numbers = self.decode(ahead.lo)
        self.offer("lo", slot)
        self.write("lo", slot, lo=numbers)
        lo = self.load(found, "lo")
        # That the other block learns of it takes as long as to decode.
        self.offer("hi", slot)
        self.write("hi", slot, rope=ahead.rope[0], hi=self.decode(ahead.hi))
        hi, rope = self.load(found, "hi"), self.load(found, "rope")
        return Ahead(self.find(tile + 2), lo, hi, rope)

    def decode(self, loaded: Loaded) -> Array:
        """Returns numbers as tiles have them."""
        return mosaic_pair.decode(*loaded, self.geometry.dtype) if self.packed else loaded[0]

    def offer(self, half: str, slot: Array) -> None:
        """Tells both blocks' producers when this block needs a half no more."""
        plgpu.barrier_wait(self.refs[f"{half}_free"].at[slot])
        plgpu.barrier_arrive(self.refs[f"{half}_free_in_both"].at[slot])

    def write(self, half: str, slot: Array, **parts: Array) -> None:
        """Writes parts of a tile for both blocks, once neither needs what stands there."""
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
