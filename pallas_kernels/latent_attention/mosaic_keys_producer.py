"""Producer warpgroup of the kernel in mosaic_keys.py: it issues all TMA copies and zeroes hidden values."""

from collections.abc import Mapping
from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_attention.mosaic_producer import Producer
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps


def tiles_of(piece: Piece) -> tuple[Array, Array, Array]:
    """Returns the share's first tile, its first tile with a hidden key, and the one past its last tile."""
    stop = jnp.minimum(SLOTS * piece.stop, pl.cdiv(piece.keys, TILE))
    return SLOTS * piece.start, jnp.clip(piece.keys // TILE, SLOTS * piece.start, stop), stop


def slot_of(kernel: KeysKernel, piece: Piece, tile: Array, number: int) -> Array:
    """Returns the index in the ring of piece `number` of a tile."""
    place = (tile - SLOTS * piece.start) * len(kernel.widths) + number
    return lax.rem(place, jnp.int32(kernel.ring))


class KeysProducer:
    """The producer warpgroup."""

    def __init__(self, kernel: KeysKernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece
        self.pool = Producer(kernel, refs, piece)

    def run(self) -> None:
        """Fetches the queries and the share's tiles."""
        kernel, refs, piece = self.kernel, self.refs, self.piece
        queries = refs["q"].at[pl.ds(piece.first_row(self.geometry), self.geometry.heads)]
        fetch = partial(plgpu.copy_gmem_to_smem, queries, refs["q_tile"].at[0], refs["q_arrived"])
        on_warps(fetch, interpret=kernel.interpret)
        start, stop = tiles_of(piece)[::2]

        @pl.loop(start, stop)
        def _(tile: Array) -> None:
            at_edge = (tile + 1) * TILE > piece.keys
            slots = [slot_of(kernel, piece, tile, number) for number in range(len(kernel.widths))]
            pages, offset = self.pool.pages(tile), self.pool.offset(tile)
            fetch = partial(self.fetch, slots, at_edge, pages, offset)
            on_warps(fetch, interpret=kernel.interpret)
            pl.when(at_edge)(partial(self.clear, tile, slots))

        if kernel.interpret:
            # The interpreter requires a wait for each completion of a barrier.
            on_warps(self.drain, interpret=True)

    def drain(self) -> None:
        """Waits until all pieces of the ring are released."""
        for slot in range(self.kernel.ring):
            plgpu.barrier_wait(self.refs["free"].at[slot])

    def fetch(
        self, slots: list[Array], at_edge: Array, pages: tuple[Array, ...], offset: Array | int
    ) -> None:
        """Starts the copies of each piece of a tile once its slot of the ring is free."""
        refs, height = self.refs, min(self.geometry.page_size, TILE)
        column = 0
        for number, (slot, width) in enumerate(zip(slots, self.kernel.widths, strict=True)):
            plgpu.barrier_wait(refs["free"].at[slot])
            # Pieces with hidden rows signal the producer's own barriers, the last ones; it zeroes the rows first.
            arrived = jnp.where(at_edge, self.kernel.ring + number, slot)
            for copy, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    refs["latent_pages"].at[page, pl.ds(offset, height), 0, pl.ds(column, width)],
                    refs["tiles"].at[slot, pl.ds(copy * height, height)],
                    refs["arrived"].at[arrived],
                )
            column += width

    def clear(self, tile: Array, slots: list[Array]) -> None:
        """Zeroes hidden values, because 0 * NaN is NaN, and then signals the consumer."""
        arrived = self.refs["arrived"]
        for number, (slot, width) in enumerate(zip(slots, self.kernel.widths, strict=True)):
            plgpu.barrier_wait(arrived.at[self.kernel.ring + number])
            for column in range(0, width, COLUMN_TILE):
                values = self.refs["tiles"].at[slot, :, pl.ds(column, COLUMN_TILE)]
                loaded = plgpu.load(values, layout=WGMMA)
                position = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=WGMMA)
                seen = position + tile * TILE < self.piece.keys
                assign(values, ..., jnp.where(seen, loaded, jnp.zeros_like(loaded)))
            plgpu.commit_smem()
            for _arrival in range(self.geometry.copies_per_tile):
                plgpu.barrier_arrive(arrived.at[slot])
