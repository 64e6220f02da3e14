"""The Mosaic GPU kernel of `grouped_matmul` for Hopper: launch, producer and consumer warpgroups.

The producer copies chunks of a weight and of a window of rows into pipeline stages (slots). One or two consumers
multiply them, 64 rows of the left operand each. Blocks are persistent: each loops over pairs of visit and tile, whose
number is known only on the device. The producer proceeds to the next pair while the consumers store.

With few rows per group the weight is the left operand and fills wgmma's 64 rows, and the rows of x are the right one,
whose width can be as small as 16. With many rows per group, rows of x are the left operand, and a tile is as wide as
registers allow.
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

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.grouped_matmul.mosaic_schedule import PIECE, STAGED, Geometry, Schedule
from pallas_kernels.grouped_matmul.mosaic_store import store_left_rows, store_right_rows
from pallas_kernels.grouped_matmul.mosaic_visits import COUNT, FIRST, GROUP, HIGH, LOW
from pallas_kernels.mosaic.launch import LANE_PARAMS, interpreter
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled

# Registers per thread (setmaxnreg) of two consumers and a producer, 504 in total; each warpgroup starts with 168.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and one schedule."""

    geometry: Geometry
    schedule: Schedule

    def build(self, interpret: bool) -> Callable[..., Array]:
        """Returns the function of weight, x and the table of visits that launches the kernel."""
        g, s = self.geometry, self.schedule
        return plgpu.kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct((g.rows, g.out), g.result),
            scratch_types=self._scratch(),
            grid=(s.grid(g),),
            grid_names=("block",),
            num_threads=s.consumers + 1,
            thread_name="warpgroup",
            # The kernel places its barriers between warps itself.
            compiler_params=LANE_PARAMS,
            interpret=interpreter(interpret),
            kernel_name="grouped_matmul",
        )

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule

        def slots(rows: int) -> Any:  # noqa: ANN401 - private to JAX
            shape = (s.stages, rows, s.chunk)
            return plgpu.SMEM(shape, g.dtype, transforms=swizzled(PIECE, g.dtype))

        return {
            "weights": slots(s.columns),
            "rows": slots(s.window),
            "staged": plgpu.SMEM(s.staged_shape(), s.staged_dtype(g)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            "free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        }

    def _body(self, weight: Ref, x: Ref, visits: Ref, out: Ref, **scratch: Ref) -> None:
        refs = {"weight": weight, "x": x, "visits": visits, "out": out} | scratch
        warpgroup, consumers = lax.axis_index("warpgroup"), self.schedule.consumers
        block = Block(self, refs)
        # Blocks of narrow windows need few registers, and two are resident per SM.
        is_wide = self.schedule.left == "rows" and consumers > 1

        @pl.when(warpgroup < consumers)
        def _() -> None:
            if is_wide:
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            block.consume(warpgroup)

        @pl.when(warpgroup == consumers)
        def _() -> None:
            if is_wide:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            block.produce()


class Block:
    """One block. A *pair* is a visit and a tile; a *step* counts the turns (iterations) of all its pairs."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        g, s = kernel.geometry, kernel.schedule
        self.geometry, self.schedule, self.refs = g, s, refs
        self.turns, self.tiles, self.grid = s.turns(g), s.tiles(g), s.grid(g)
        self.number = lax.axis_index("block")
        pairs = refs["visits"][COUNT, 0] * self.tiles
        # Number of this block's pairs: number, number + grid, ... below `pairs`.
        self.pairs = lax.div(pairs - self.number + (self.grid - 1), jnp.int32(self.grid))

    def find(self, pair: Array) -> tuple[Array, Array]:
        """Returns the visit and the first column of the block's `pair`-th pair."""
        number = self.number + pair * self.grid
        visit, tile = lax.div(number, jnp.int32(self.tiles)), lax.rem(number, jnp.int32(self.tiles))
        column = jnp.minimum(
            tile * self.schedule.columns, self.geometry.out - self.schedule.columns
        )
        return visit, pl.multiple_of(column, ROW_TILE)

    def slot(self, step: Array) -> Array:
        """Returns the pipeline stage of a step."""
        return lax.rem(step, jnp.int32(self.schedule.stages))

    def produce(self) -> None:
        """Runs the producer: copies each chunk into a stage that all consumers have released."""
        stages = self.schedule.stages

        def process_pair(pair: Array, carry: None) -> None:
            visit, column = self.find(pair)
            group = self.refs["visits"][GROUP, visit]
            first = pl.multiple_of(self.refs["visits"][FIRST, visit], ROW_TILE)

            def process_turn(turn: Array, carry: None) -> None:
                step = pair * self.turns + turn
                slot = self.slot(step)
                pl.when(step >= stages)(partial(plgpu.barrier_wait, self.refs["free"].at[slot]))
                self.fetch(slot, group, first, column, turn)
                return carry

            lax.fori_loop(jnp.int32(0), jnp.int32(self.turns), process_turn, None)
            return carry

        lax.fori_loop(jnp.int32(0), self.pairs, process_pair, None)
        # All arrivals at a barrier must be waited for before the block exits.
        steps = self.pairs * self.turns

        def drain(step: Array, carry: None) -> None:
            plgpu.barrier_wait(self.refs["free"].at[self.slot(step)])
            return carry

        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    def fetch(self, slot: Array, group: Array, first: Array, column: Array, turn: Array) -> None:
        """Starts the copies of one chunk.

        All threads arrive on the barrier of a copy that one of them starts, so no thread can lag two rounds of the
        pipeline behind another.
        """
        g, s, refs = self.geometry, self.schedule, self.refs
        inner = pl.ds(pl.multiple_of(turn * s.chunk, PIECE), s.chunk)
        columns = pl.ds(column, s.columns)
        place = (group, columns) if g.group_axis == 0 else (columns, group)
        arrived = refs["arrived"].at[slot]
        plgpu.copy_gmem_to_smem(
            refs["weight"].at[(*place, inner)], refs["weights"].at[slot], arrived
        )
        rows = refs["x"].at[pl.ds(first, s.window), inner]
        plgpu.copy_gmem_to_smem(rows, refs["rows"].at[slot], arrived)

    def consume(self, warpgroup: Array) -> None:
        """Runs a consumer: multiplies its 64 rows of the left operand, and stores the visits' own rows."""

        def process_pair(pair: Array, carry: None) -> None:
            visit, column = self.find(pair)
            first, low, high = (self.refs["visits"][fact, visit] for fact in (FIRST, LOW, HIGH))
            sums = self.multiply(warpgroup, pair)
            staged = self.refs["staged"].at[warpgroup]
            if self.schedule.left == "weight":
                place = column + warpgroup * WGMMA_ROWS
                store_right_rows(self.refs["out"], sums, staged, first, low, high, place)
            else:
                own = first + warpgroup * WGMMA_ROWS
                store_left_rows(self.refs["out"], sums, staged, own, low, high, column, STAGED)
            return carry

        lax.fori_loop(jnp.int32(0), self.pairs, process_pair, None)

    def multiply(self, warpgroup: Array, pair: Array) -> Array:
        """Returns the sums of a pair, 64 rows of the left operand x all columns of the right one."""
        s, refs = self.schedule, self.refs
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)
        names = ("weights", "rows") if s.left == "weight" else ("rows", "weights")

        def process_turn(sums: Ref, turn: Array, carry: None) -> None:
            step = pair * self.turns + turn
            slot = self.slot(step)
            plgpu.barrier_wait(refs["arrived"].at[slot])
            left, right = (refs[name].at[slot] for name in names)
            plgpu.wgmma(sums, left.at[own], right.transpose((1, 0)))
            # Wait for the previous turn's product, then release its stage.
            plgpu.wgmma_wait(1)

            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_arrive(refs["free"].at[self.slot(step - 1)])

            return carry

        def run(sums: Ref) -> Array:
            lax.fori_loop(jnp.int32(0), jnp.int32(self.turns), partial(process_turn, sums), None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs["free"].at[self.slot((pair + 1) * self.turns - 1)])
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC((WGMMA_ROWS, s.width), jnp.float32))
