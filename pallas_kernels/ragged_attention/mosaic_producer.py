"""Producer warpgroup of the `ragged_attention` kernel: it issues all TMA copies and zeroes hidden values."""

from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.loads import prefetch
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import WARPS, on_warps
from pallas_kernels.ragged_attention.mosaic_piece import Piece, Worker, quotient, remainder


class Producer(Worker):
    """The producer warpgroup."""

    def run(self) -> None:
        """Fetches the tiles of all pieces."""
        self.visit_pieces(self.fetch_piece)
        if self.kernel.interpret:
            self.drain()

    def drain(self) -> None:
        """Waits until all stages are released; the interpreter requires a wait for each completion of a barrier."""
        for free in self.free_barriers():
            plgpu.barrier_wait(free)

    def fetch_piece(self, piece: Piece, keys_before: Array, queries_before: Array) -> None:
        """Fetches the queries of a piece, then its keys and values tile by tile."""
        self.start_queries(piece, queries_before)

        @pl.loop(piece.first, piece.stop)
        def _(tile: Array) -> None:
            slot = self.slot(keys_before + tile - piece.first)
            at_edge = self.is_at_edge(piece, tile)
            arrived = self.barrier_of_values(at_edge, slot)
            fetch = partial(
                self.fetch, piece=piece, tile=tile, slot=slot, offsets=self.offsets(tile)
            )
            fetches = partial(fetch, "k", arrived=slot), partial(fetch, "v", arrived=arrived)
            on_warps(*fetches, interpret=self.kernel.interpret)
            pl.when(at_edge)(partial(self.clear, piece, tile, slot))

    def start(self, piece: Piece) -> None:
        """Starts the copies of a piece's queries and of its first tiles; the block has no other piece."""
        self.start_queries(piece, queries_before=jnp.int32(0))
        for stage in range(self.schedule.stages):
            for pool in ("k", "v"):
                self.start_tile(pool, piece, piece.first, jnp.int32(stage), stage)

    def start_queries(self, piece: Piece, queries_before: Array) -> None:
        """Starts the copies of a piece's queries, if it exists."""
        tokens = [
            pl.multiple_of(piece.tile.token + first, ROW_TILE)
            for first in range(0, self.geometry.tokens_per_tile, self.geometry.tokens_per_consumer)
        ]
        slot = self.query_slot(queries_before)
        queries = partial(self.fetch_queries, piece, tokens, slot)
        on_warps(lambda: pl.when(piece.exists)(queries), interpret=self.kernel.interpret)

    def start_tile(self, pool: str, piece: Piece, tile: Array, slot: Array, ahead: int) -> None:
        """Starts the copies of the tile `ahead` after `tile` from the "k" or "v" pool, if the piece has it."""
        tile += ahead

        @pl.when(tile < piece.stop)
        def _() -> None:
            arrived = slot
            if pool == "v":
                arrived = self.barrier_of_values(self.is_at_edge(piece, tile), slot)
            fetch = partial(
                self.fetch,
                pool,
                piece=piece,
                tile=tile,
                slot=slot,
                offsets=self.offsets(tile),
                arrived=arrived,
            )
            # The warps are a consumer's, so they share the work, and few registers are needed at once.
            warps = 1 if self.kernel.interpret else min(WARPS, self.copies)
            shares = [partial(fetch, first=warp, step=warps) for warp in range(warps)]
            on_warps(*shares, interpret=self.kernel.interpret)

    def prefetch_pages(self, piece: Piece, tile: Array) -> None:
        """Brings the page ids of the tile that `start_tile` starts next into L1, since it waits for them."""
        if self.kernel.interpret:
            return
        page_size = self.geometry.page_size
        last = quotient(jnp.maximum(piece.tile.seq_len - 1, 0), page_size)
        start = (tile + self.schedule.stages) * self.schedule.keys
        prefetch(
            self.refs["page_table"], piece.tile.row, jnp.minimum(quotient(start, page_size), last)
        )

    def clear_hidden(self, piece: Piece, tile: Array, slot: Array) -> None:
        """Zeroes hidden values of a tile, if it has any."""
        pl.when(self.is_at_edge(piece, tile))(partial(self.clear, piece, tile, slot))

    def barrier_of_values(self, at_edge: Array, slot: Array) -> Array:
        """Returns the barrier that a tile of values signals: one of the last ones, if hidden rows must be zeroed."""
        return jnp.where(at_edge, self.edge(slot), slot)

    def edge(self, slot: Array) -> Array | int:
        """Returns the index of the barrier of a stage's values before their hidden rows are zeroed."""
        stages = self.schedule.stages
        return stages if self.kernel.has_producer else stages + slot

    def is_at_edge(self, piece: Piece, tile: Array) -> Array:
        """Returns whether a tile has hidden keys at its end or at its start."""
        at_edge = (tile + 1) * self.schedule.keys > piece.tile.seq_len
        at_edge |= tile * self.schedule.keys < piece.tile.first_key
        return at_edge

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

    @property
    def copies(self) -> int:
        """Number of copies of a tile from one pool."""
        return self.schedule.keys // self.geometry.copy_height(self.schedule.keys)

    def pages(self, piece: Piece, tile: Array, copies: range) -> tuple[Array, ...]:
        """Returns the page ids of some copies of a tile; for pages without a visible key the nearest one with any."""
        page_size, keys = self.geometry.page_size, self.schedule.keys
        height = self.geometry.copy_height(keys)
        first = quotient(piece.tile.first_key, page_size)
        last = quotient(jnp.maximum(piece.tile.seq_len - 1, 0), page_size)
        starts = [tile * keys + copy * height for copy in copies]
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
        first: int = 0,
        step: int = 1,
    ) -> None:
        """Starts every `step`-th copy of one tile from the "k" or "v" pool once its stage is free."""
        refs, height = self.refs, self.geometry.copy_height(self.schedule.keys)
        copies = range(first, self.copies, step)
        # Page ids are loaded before the wait, which hides their latency.
        pages = self.pages(piece, tile, copies)
        plgpu.barrier_wait(refs[f"{pool}_free"].at[slot])
        for copy, page in zip(copies, pages, strict=True):
            plgpu.copy_gmem_to_smem(
                refs[f"{pool}_pages"].at[page, pl.ds(offsets[copy], height), piece.kv_head],
                refs[f"{pool}_tiles"].at[slot, pl.ds(copy * height, height)],
                refs[f"{pool}_arrived"].at[arrived],
            )

    def clear(self, piece: Piece, tile: Array, slot: Array) -> None:
        """Zeroes hidden values, because 0 * NaN is NaN, and then signals the consumers."""
        arrived = self.refs["v_arrived"]
        plgpu.barrier_wait(arrived.at[self.edge(slot)])

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
        for _copy in range(self.copies):
            plgpu.barrier_arrive(arrived.at[slot])
