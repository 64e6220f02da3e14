"""One block of the `skinny_matmul` kernel: TMA copies, the loop over tiles, and staging of sums."""

from collections.abc import Callable, Mapping
from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.jax_versions import assign, first_rows
from pallas_kernels.mosaic.private_types import Ref, Slice
from pallas_kernels.skinny_matmul.mosaic_ending import End, Ending
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_join import Join, rows_of
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule


class Block:
    """One block. A *turn* is an iteration over a tile's contraction; a *step* counts the turns of all its tiles.

    `first_row` is the first row of the block's group in the call; `None` if the call is one group. `await_previous`, if
    it is given, waits for the previous kernel, whose end the copies of the weight's first turns need not await.
    """

    def __init__(
        self,
        geometry: Geometry,
        schedule: Schedule,
        ending: Ending,
        refs: Mapping[str, Ref],
        first_row: Array | None,
        await_previous: Callable[[], None] | None = None,
    ) -> None:
        g, s = self.geometry, self.schedule = geometry, schedule
        self.await_previous = await_previous
        self.refs, self.first_row = refs, first_row
        self.block, self.split = lax.axis_index("block"), lax.axis_index("split")
        self.rank = lax.axis_index("share") if s.cluster > 1 else jnp.int32(0)
        self.share = self.split * s.cluster + self.rank
        self.turns, self.tiles = s.turns_per_tile(g), s.tiles_per_block(g)
        self.steps = self.turns * self.tiles
        self.end = End(g, s, ending, refs, first_row)

    def run(self, multiply: "Multiply") -> None:
        """Processes the block's tiles; copies for the next tile are in flight while one is stored.

        Args:
            multiply: returns the sums of a tile, rows of the weight x rows of x, as arrays of equal height.
        """
        first = range(min(self.schedule.stages, self.steps))
        for step in first:
            self.fetch_weight(jnp.int32(step), step)
            if self.await_previous is None:
                self.fetch_rows(jnp.int32(step), step)
        if self.await_previous is not None:
            self.await_previous()
            for step in first:
                self.fetch_rows(jnp.int32(step), step)
        self.end.prepare()
        if self.tiles == 1:
            self.process_tile(multiply, jnp.int32(0))
            return

        def body(tile: Array, carry: None) -> None:
            self.process_tile(multiply, tile)
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.tiles), body, None)

    def first_column(self, tile: Array) -> Array:
        """Returns the first column of a tile; the last tile is shifted left so that it is whole."""
        g, s = self.geometry, self.schedule
        start = (self.block * self.tiles + tile) * s.columns
        return pl.multiple_of(jnp.minimum(start, g.out - s.columns), ROW_TILE)

    def fetch_weight(self, step: Array, slot: Array | int) -> None:
        """Starts the copies of a turn's weight into a stage; all warps have passed a barrier since its last read."""
        g, s, refs = self.geometry, self.schedule, self.refs
        column = self.first_column(lax.div(step, jnp.int32(self.turns)))
        size, piece = s.chunk(g), g.piece
        if g.packing is not None:
            size, piece = s.chunk(g) * g.bits // 8, g.piece_bytes
        for fold in range(s.folds):
            stored = self._inner(step, fold, size, piece)
            for part in range(g.parts):
                rows = pl.multiple_of(column + part * g.out, ROW_TILE)
                place = (fold * g.parts + part) * s.columns
                plgpu.copy_gmem_to_smem(
                    refs["weight"].at[pl.ds(rows, s.columns), stored],
                    refs["weights"].at[pl.ds(self.stage(slot).start + place, s.columns)],
                    refs["arrived"].at[slot],
                )

    def fetch_rows(self, step: Array, slot: Array | int) -> None:
        """Starts the copies of a turn's rows of x likewise."""
        g, s, refs = self.geometry, self.schedule, self.refs
        rows = first_rows(g.padded_rows)
        if self.first_row is not None:
            rows = pl.ds(self.first_row, g.padded_rows)
        for fold in range(s.folds):
            plgpu.copy_gmem_to_smem(
                refs["x"].at[rows, self._inner(step, fold, s.chunk(g), g.piece)],
                refs["inputs"].at[slot, pl.ds(fold * g.padded_rows, g.padded_rows)],
                refs["arrived"].at[slot],
            )

    def _inner(self, step: Array, fold: int, size: int, multiple: int) -> Slice:
        """Returns the part of the contraction of a fold of a turn, in elements of which a chunk has `size`."""
        turn = lax.rem(step, jnp.int32(self.turns))
        chunk = (self.share * self.turns + turn) * self.schedule.folds + fold
        return pl.ds(pl.multiple_of(chunk * size, multiple), size)

    def process_tile(self, multiply: "Multiply", tile: Array) -> None:
        """Computes the sums of one tile and runs the epilogue on them."""
        s, g = self.schedule, self.geometry
        sums = multiply(self, tile)
        number = jnp.minimum(self.block * self.tiles + tile, s.tiles(g) - 1)
        store = partial(self.end.store, number, self.first_column(tile), self.split)
        if s.cluster > 1:
            Join(g, s, self.refs, self.rank).deliver(sums[0], store)
            return
        window = s.window(g)
        for first in range(0, g.rows, window):
            for index, found in enumerate(sums):
                part = found if s.passes == 1 else rows_of(found, first, window)
                place = pl.ds(index * part.shape[0], part.shape[0]), pl.ds(0, part.shape[1])
                assign(self.refs["sums"].at[*place], ..., part)
            plgpu.commit_smem()
            store(first, min(window, g.rows - first))
            if self.tiles > 1 or first + window < g.rows:
                plgpu.commit_smem()

    def arrive(self, step: Array) -> Array:
        """Waits until a turn's copies have arrived, and returns their stage."""
        slot = lax.rem(step, jnp.int32(self.schedule.stages))
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        return slot

    def stage(self, slot: Array | int) -> Slice:
        """Returns the rows of the weights in shared memory that a product of a stage reads, from its first on."""
        s, g = self.schedule, self.geometry
        first = jnp.int32(slot * s.height(g))
        return pl.ds(pl.multiple_of(first, ROW_TILE), s.product_rows(g))

    def refill(self, step: Array) -> None:
        """Refills the stage of a turn, which this warp has read, with the copies of a later turn."""
        later = step + self.schedule.stages

        @pl.when((step >= 0) & (later < self.steps))
        def _() -> None:
            plgpu.commit_smem()
            slot = lax.rem(later, jnp.int32(self.schedule.stages))
            self.fetch_weight(later, slot)
            self.fetch_rows(later, slot)


Multiply = Callable[[Block, Array], list[Array]]
