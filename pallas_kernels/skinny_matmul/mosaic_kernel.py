"""The Mosaic GPU kernel of `skinny_matmul` for Hopper: what one block does, from its first copy to its columns.

The weight stands on the left of the tensor cores' products, where it fills their height of 64 whatever the number of
rows of x is; these stand on the right, where 8 are as many as 8. One warpgroup fetches, multiplies and stores: all
it does between two turns is to send for the next chunk, so the memory never waits for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic_rows import INTERPRETED
from pallas_kernels.paged_attention.mosaic_tile import swizzled
from pallas_kernels.skinny_matmul.mosaic_ending import End, Ending
from pallas_kernels.skinny_matmul.mosaic_geometry import ROW_TILE, Geometry
from pallas_kernels.skinny_matmul.mosaic_join import Join, rows_of, shared
from pallas_kernels.skinny_matmul.mosaic_packed import take_packed
from pallas_kernels.skinny_matmul.mosaic_schedule import PADDING, Schedule

Ref = Any


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one schedule and one ending."""

    geometry: Geometry
    schedule: Schedule
    ending: Ending

    def build(self, interpret: bool) -> Callable[..., list[Array]]:
        """Returns the function of weight, x and what the ending needs that launches the kernel.

        It returns the result, and what `Ending.weighs` says: sums of squares have shape [tiles, rows].
        """
        clusters: dict[str, Any] = {}
        if self.schedule.cluster > 1:
            clusters = {"cluster": (self.schedule.cluster,), "cluster_names": ("share",)}
        return plgpu.kernel(
            partial(self._body, interpret),
            out_type=self._out_type(),
            scratch_types=self._scratch(),
            grid=(self.schedule.grid(self.geometry), self.schedule.splits),
            grid_names=("block", "split"),
            **clusters,
            # `Block` says which barriers take the place of those that would be added.
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
            interpret=INTERPRETED if interpret else None,
            kernel_name="skinny_matmul",
        )

    def _out_type(self) -> list[jax.ShapeDtypeStruct]:
        g, s = self.geometry, self.schedule
        if s.splits > 1:
            return [jax.ShapeDtypeStruct((s.splits, g.rows, g.parts * g.out), jnp.float32)]
        out_type = [jax.ShapeDtypeStruct((g.rows, g.out), self.ending.result)]
        if self.ending.weighs:
            squares = jax.ShapeDtypeStruct((s.tiles(g), g.rows), jnp.float32)
            out_type = [*out_type, *out_type, squares]
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule

        def slots(rows: int, dtype: DTypeLike) -> Any:  # noqa: ANN401 - private to JAX
            shape, transforms = (s.stages, rows, s.chunk(g)), swizzled(s.chunk(g), dtype)
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        copies = s.folds * (g.parts + 1)
        factors = (
            {}
            if self.ending.norm_eps is None
            else {"factors": plgpu.SMEM((g.padded_rows,), jnp.float32)}
        )
        return {
            **factors,
            **(shared(g, s) if s.cluster > 1 else {}),
            "weights": slots(s.height(g), g.stored),
            "inputs": slots(s.width(g), g.operand),
            "sums": plgpu.SMEM((s.height(g), s.folds * s.window(g) + PADDING), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        }

    def _body(self, interpret: bool, *refs: Ref, **scratch: Ref) -> None:
        names = ["weight", "x", *self.ending.inputs, *self.ending.outputs]
        named = dict(zip(names, refs, strict=True))
        Block(self, named | scratch, interpret=interpret).run()


class Block:
    """One block at work. A *step* counts the turns of all its tiles."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], *, interpret: bool) -> None:
        g, s = kernel.geometry, kernel.schedule
        self.geometry, self.schedule, self.refs, self.interpret = g, s, refs, interpret
        self.block, self.split = lax.axis_index("block"), lax.axis_index("split")
        self.rank = lax.axis_index("share") if s.cluster > 1 else jnp.int32(0)
        self.share = self.split * s.cluster + self.rank
        self.turns, self.tiles = s.turns_per_tile(g), s.tiles_per_block(g)
        self.steps = self.turns * self.tiles
        self.end = End(g, s, kernel.ending, refs)

    def run(self) -> None:
        """Works through the block's tiles; copies for the next one are under way while one is stored."""
        for step in range(min(self.schedule.stages, self.steps)):
            self.fetch(jnp.int32(step), step)
        self.end.prepare()
        if self.tiles == 1:
            self.take_tile(jnp.int32(0))
            return

        def body(tile: Array, carry: None) -> None:
            self.take_tile(tile)
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(self.tiles), body, None)

    def first_column(self, tile: Array) -> Array:
        """Returns where a tile begins."""
        g, s = self.geometry, self.schedule
        start = (self.block * self.tiles + tile) * s.columns
        return pl.multiple_of(jnp.minimum(start, g.out - s.columns), ROW_TILE)

    def fetch(self, step: Array, slot: Array | int) -> None:
        """Starts the copies of one turn; every warp must have passed a barrier since the slot was last read."""
        g, s, refs = self.geometry, self.schedule, self.refs
        tile, turn = lax.div(step, jnp.int32(self.turns)), lax.rem(step, jnp.int32(self.turns))
        column = self.first_column(tile)
        arrived = refs["arrived"].at[slot]
        for fold in range(s.folds):
            chunk = (self.share * self.turns + turn) * s.folds + fold
            inner = pl.ds(pl.multiple_of(chunk * s.chunk(g), g.piece), s.chunk(g))
            for part in range(g.parts):
                rows = pl.multiple_of(column + part * g.out, ROW_TILE)
                place = (fold * g.parts + part) * s.columns
                plgpu.copy_gmem_to_smem(
                    refs["weight"].at[pl.ds(rows, s.columns), inner],
                    refs["weights"].at[slot, pl.ds(place, s.columns)],
                    arrived,
                )
            plgpu.copy_gmem_to_smem(
                refs["x"].at[pl.ds(0, g.padded_rows), inner],
                refs["inputs"].at[slot, pl.ds(fold * g.padded_rows, g.padded_rows)],
                arrived,
            )

    def take_tile(self, tile: Array) -> None:
        """Computes the sums of one tile and delivers them."""
        s, g = self.schedule, self.geometry
        take = take_packed if g.packed else take_wide
        sums = take(self, tile, interpret=self.interpret)
        number = jnp.minimum(self.block * self.tiles + tile, s.tiles(g) - 1)
        store = partial(self.end.store, number, self.first_column(tile), self.split)
        if s.cluster > 1:
            Join(g, s, self.refs, self.rank).deliver(sums[0], store)
            return
        height, window = s.height(g) // len(sums), s.window(g)
        for first in range(0, g.rows, window):
            for index, found in enumerate(sums):
                part = found if s.passes == 1 else rows_of(found, first, window)
                place = pl.ds(index * height, height), pl.ds(0, part.shape[1])
                self.refs["sums"].at[*place][...] = part
            plgpu.commit_smem()
            store(first, min(window, g.rows - first))
            if self.tiles > 1 or first + window < g.rows:
                plgpu.commit_smem()

    def arrive(self, step: Array) -> Array:
        """Waits for a turn's numbers and returns the slot that they lie in."""
        slot = lax.rem(step, jnp.int32(self.schedule.stages))
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        return slot

    def refill(self, step: Array) -> None:
        """Sends for what shall lie where a turn's numbers lay, which this warp has read."""
        later = step + self.schedule.stages

        @pl.when((step >= 0) & (later < self.steps))
        def _() -> None:
            plgpu.commit_smem()
            self.fetch(later, lax.rem(later, jnp.int32(self.schedule.stages)))


def take_wide(block: Block, tile: Array, *, interpret: bool) -> list[Array]:
    """Returns the sums of a tile, rows of the weight by rows of x."""
    del interpret
    s, refs = block.schedule, block.refs

    def take_turn(sums: Ref, turn: Array, carry: None) -> None:
        step = tile * block.turns + turn
        slot = block.arrive(step)
        plgpu.wgmma(sums, refs["weights"].at[slot], refs["inputs"].at[slot].transpose((1, 0)))
        # The product of the turn before is done.
        plgpu.wgmma_wait(1)
        block.refill(step - 1)
        return carry

    def multiply(sums: Ref) -> Array:
        lax.fori_loop(jnp.int32(0), jnp.int32(block.turns), partial(take_turn, sums), None)
        plgpu.wgmma_wait(0)
        return sums[...]

    shape = (s.height(block.geometry), s.width(block.geometry))
    return [pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))]
