"""Producer warpgroup of the `ragged_attention` kernel: it issues all TMA copies and zeroes hidden values."""

from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.ragged_attention.mosaic_piece import Piece, Worker, quotient, remainder


class Producer(Worker):
    """The producer warpgroup."""

    def run(self) -> None:
        """Fetches the tiles of all pieces."""
        self.visit_pieces(self.fetch_piece)
        if self.kernel.interpret:
            # The interpreter requires a wait for each completion of a barrier.
            for free in self.free_barriers():
                plgpu.barrier_wait(free)

    def fetch_piece(self, piece: Piece, keys_before: Array, queries_before: Array) -> None:
        """Fetches the queries of a piece, then its keys and values tile by tile."""
        interpret = self.kernel.interpret
        tokens = [
            pl.multiple_of(piece.tile.token + first, ROW_TILE)
            for first in range(0, self.geometry.tokens_per_tile, self.geometry.tokens_per_consumer)
        ]
        slot = self.query_slot(queries_before)
        queries = partial(self.fetch_queries, piece, tokens, slot)
        on_warps(lambda: pl.when(piece.exists)(queries), interpret=interpret)

        @pl.loop(piece.first, piece.stop)
        def _(tile: Array) -> None:
            slot = self.slot(keys_before + tile - piece.first)
            at_edge = (tile + 1) * self.schedule.keys > piece.tile.seq_len
            at_edge |= tile * self.schedule.keys < piece.tile.first_key
            # Values with hidden rows signal the producer's own barrier, the last one; it zeroes the rows first.
            arrived = jnp.where(at_edge, self.schedule.stages, slot)
            fetch = partial(
                self.fetch, piece=piece, tile=tile, slot=slot, offsets=self.offsets(tile)
            )
            fetches = partial(fetch, "k", arrived=slot), partial(fetch, "v", arrived=arrived)
            on_warps(*fetches, interpret=interpret)
            pl.when(at_edge)(partial(self.clear, piece, tile, slot))

    def fetch_queries(self, piece: Piece, tokens: list[Array], slot: Array) -> None:
        """Starts the copies of both consumers' queries, one copy per consumer and head."""
        refs, count = self.refs, self.geometry.tokens_per_consumer
        plgpu.barrier_wait(refs["q_free"].at[slot])
        for consumer, token in enumerate(tokens):
            for head in range(self.geometry.pack):
                plgpu.copy_gmem_to_smem(
                    refs["q"].at[pl.ds(token, count), piece.head + head],
                    refs["q_tiles"].at[slot, consumer, pl.ds(head * count, count)],
                    refs["q_arrived"].at[slot],
                )

    def pages(self, piece: Piece, tile: Array) -> tuple[Array, ...]:
        """Returns the page ids of one tile; pages without a visible key are replaced by the nearest one with any."""
        page_size, keys = self.geometry.page_size, self.schedule.keys
        height = self.geometry.copy_height(keys)
        first = quotient(piece.tile.first_key, page_size)
        last = quotient(jnp.maximum(piece.tile.seq_len - 1, 0), page_size)
        starts = [tile * keys + copy * height for copy in range(keys // height)]
        return tuple(
            self.refs["page_table"][
                piece.tile.row, jnp.clip(quotient(start, page_size), first, last)
            ]
            for start in starts
        )

    def offsets(self, tile: Array) -> list[Array | int]:
        """Returns the offset in its page at which each of one tile's copies starts."""
        keys, page_size = self.schedule.keys, self.geometry.page_size
        height = self.geometry.copy_height(keys)
        if height == page_size:
            return [0] * (keys // height)
        starts = [tile * keys + copy * height for copy in range(keys // height)]
        return [pl.multiple_of(remainder(start, page_size), height) for start in starts]

    def fetch(
        self,
        pool: str,
        *,
        piece: Piece,
        tile: Array,
        slot: Array,
        offsets: list[Array | int],
        arrived: Array,
    ) -> None:
        """Starts the copies of one tile from the "k" or "v" pool once its stage is free."""
        refs, height = self.refs, self.geometry.copy_height(self.schedule.keys)
        # Page ids are loaded before the wait, which hides their latency.
        pages = self.pages(piece, tile)
        plgpu.barrier_wait(refs[f"{pool}_free"].at[slot])
        for copy, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
            plgpu.copy_gmem_to_smem(
                refs[f"{pool}_pages"].at[page, pl.ds(offset, height), piece.kv_head],
                refs[f"{pool}_tiles"].at[slot, pl.ds(copy * height, height)],
                refs[f"{pool}_arrived"].at[arrived],
            )

    def clear(self, piece: Piece, tile: Array, slot: Array) -> None:
        """Zeroes hidden values, because 0 * NaN is NaN, and then signals the consumers."""
        arrived = self.refs["v_arrived"]
        plgpu.barrier_wait(arrived.at[self.schedule.stages])

        @pl.loop(0, self.schedule.keys // WGMMA_ROWS)
        def _(part: Array) -> None:
            start = pl.multiple_of(part * WGMMA_ROWS, WGMMA_ROWS)
            for column in range(0, self.geometry.head_dim, 64):
                values = self.refs["v_tiles"].at[slot, pl.ds(start, WGMMA_ROWS), pl.ds(column, 64)]
                loaded = plgpu.load(values, layout=WGMMA)
                position = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=WGMMA)
                position += tile * self.schedule.keys + start
                seen = (position >= piece.tile.first_key) & (position < piece.tile.seq_len)
                assign(values, ..., jnp.where(seen, loaded, jnp.zeros_like(loaded)))

        plgpu.commit_smem()
        for _copy in range(self.schedule.keys // self.geometry.copy_height(self.schedule.keys)):
            plgpu.barrier_arrive(arrived.at[slot])
