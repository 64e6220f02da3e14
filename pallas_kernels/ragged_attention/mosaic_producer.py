"""The producer of the `ragged_attention` kernel: the warpgroup that starts all copies into shared memory."""

from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.ragged_attention.mosaic_piece import Piece, Worker, quotient, remainder


class Producer(Worker):
    """The warpgroup that starts all copies into shared memory."""

    def run(self) -> None:
        """Fetches the tiles of all pieces."""
        self.visit_pieces(self.fetch_piece)
        if self.kernel.interpret:
            # The interpreter wants each completion to be waited for.
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
            # Values that are yet to be cleared arrive at the producer's own barrier, the last one.
            arrived = jnp.where(at_edge, self.schedule.stages, slot)
            fetch = partial(
                self.fetch, piece=piece, tile=tile, slot=slot, offsets=self.offsets(tile)
            )
            fetches = partial(fetch, "k", arrived=slot), partial(fetch, "v", arrived=arrived)
            on_warps(*fetches, interpret=interpret)
            pl.when(at_edge)(partial(self.clear, piece, tile, slot))

    def fetch_queries(self, piece: Piece, tokens: list[Array], slot: Array) -> None:
        """Starts the copies of the queries of both consumers, from these tokens on, a head at a time."""
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
        """Returns the ids of one tile's pages; in the place of one that holds no key to see stands one that does."""
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
        """Returns where in their pages one tile's copies start."""
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
        """Starts the copies of one tile from the "k" or "v" pool once its slot is free."""
        refs, height = self.refs, self.geometry.copy_height(self.schedule.keys)
        # Read before the wait, which hides it.
        pages = self.pages(piece, tile)
        plgpu.barrier_wait(refs[f"{pool}_free"].at[slot])
        for copy, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
            plgpu.copy_gmem_to_smem(
                refs[f"{pool}_pages"].at[page, pl.ds(offset, height), piece.kv_head],
                refs[f"{pool}_tiles"].at[slot, pl.ds(copy * height, height)],
                refs[f"{pool}_arrived"].at[arrived],
            )

    def clear(self, piece: Piece, tile: Array, slot: Array) -> None:
        """Zeroes values that the row must not see, which a weight of zero would not do: it does not silence a NaN."""
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
                values[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))

        plgpu.commit_smem()
        for _copy in range(self.schedule.keys // self.geometry.copy_height(self.schedule.keys)):
            plgpu.barrier_arrive(arrived.at[slot])
