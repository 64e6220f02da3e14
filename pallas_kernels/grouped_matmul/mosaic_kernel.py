"""The Mosaic GPU kernel of `grouped_matmul` for Hopper: launch, producer and consumer warpgroups.

The producer copies chunks of a weight and of a window of rows into pipeline stages (slots). One to three consumers
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
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.formats.few_bits import CODES
from pallas_kernels.grouped_matmul.mosaic_schedule import PIECE, STAGED, Geometry, Schedule
from pallas_kernels.grouped_matmul.mosaic_store import store_left_rows, store_right_rows
from pallas_kernels.grouped_matmul.mosaic_visits import COUNT, FIRST, GROUP, HIGH, LOW
from pallas_kernels.mosaic.few_bits_turn import (
    Factors,
    add_products,
    add_widened,
    turn_factors,
)
from pallas_kernels.mosaic.jax_versions import request_registers
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, swizzle_of, swizzled

# Registers per thread (setmaxnreg) of consumers and the producer. Three warpgroups start with 168 each, four with 128.
_REGISTERS, _REGISTERS_OF_FEW_BITS = (232, 40), {2: (216, 72), 3: (144, 80)}

# Widest window for which the registers hold two products of a weight in few bits at once.
_FEW = 16


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and one schedule."""

    geometry: Geometry
    schedule: Schedule

    def build(self, interpret: bool) -> Callable[..., Array]:
        """Returns the function of weight, x and the table of visits that launches the kernel."""
        g, s = self.geometry, self.schedule
        return mosaic_kernel(
            partial(self._body, interpret),
            out_type=jax.ShapeDtypeStruct((g.rows, g.out), g.result),
            scratch_types=self._scratch(),
            grid=(s.grid(g),),
            grid_names=("block",),
            num_threads=s.consumers + 1,
            thread_name="warpgroup",
            # The kernel places its barriers between warps itself.
            compiler_params=LANE_PARAMS,
            interpret=interpret,
            kernel_name="grouped_matmul",
        )

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule

        def slots(rows: int, width: int, dtype: DTypeLike) -> Any:  # noqa: ANN401 - private to JAX
            transforms = swizzled(width, dtype)
            return plgpu.SMEM((s.stages, rows, width), dtype, transforms=transforms)

        stored = g.dtype if g.packing is None else CODES[g.packing.code].stored
        width = s.chunk if g.packing is None else s.chunk * g.bits // 8
        return {
            "weights": slots(s.columns, width, stored),
            "rows": slots(s.window, s.chunk, g.dtype),
            "staged": plgpu.SMEM(s.staged_shape(), s.staged_dtype(g)),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=s.stages),
            "free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        }

    def _body(self, interpret: bool, *arrays: Ref, **scratch: Ref) -> None:
        packing = self.geometry.packing
        names = ["weight", *(packing.names if packing else []), "x", "visits", "out"]
        refs = dict(zip(names, arrays, strict=True)) | scratch
        warpgroup, consumers = lax.axis_index("warpgroup"), self.schedule.consumers
        block = Block(self, refs, interpret)
        # Other blocks need few registers, and two are resident per SM.
        fills_registers = self.schedule.left == "rows" or packing is not None
        is_wide = fills_registers and consumers > 1
        requested = _REGISTERS if packing is None else _REGISTERS_OF_FEW_BITS.get(consumers, (0, 0))
        consumed, produced = requested

        @pl.when(warpgroup < consumers)
        def _() -> None:
            if is_wide:
                request_registers(consumed, more=True)
            block.consume(warpgroup)

        @pl.when(warpgroup == consumers)
        def _() -> None:
            if is_wide:
                request_registers(produced, more=False)
            block.produce()


class Block:
    """One block. A *pair* is a visit and a tile; a *step* counts the turns (iterations) of all its pairs."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], interpret: bool) -> None:
        g, s = kernel.geometry, kernel.schedule
        self.geometry, self.schedule, self.refs, self.interpret = g, s, refs, interpret
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
        stored = inner
        if g.packing is not None:
            octets = s.chunk * g.bits // 8
            stored = pl.ds(pl.multiple_of(turn * octets, swizzle_of(octets)), octets)
        place = (group, columns) if g.group_axis == 0 else (columns, group)
        arrived = refs["arrived"].at[slot]
        plgpu.copy_gmem_to_smem(
            refs["weight"].at[(*place, stored)], refs["weights"].at[slot], arrived
        )
        rows = refs["x"].at[pl.ds(first, s.window), inner]
        plgpu.copy_gmem_to_smem(rows, refs["rows"].at[slot], arrived)

    def consume(self, warpgroup: Array) -> None:
        """Runs a consumer: multiplies its 64 rows of the left operand, and stores the visits' own rows."""

        def process_pair(pair: Array, carry: None) -> None:
            visit, column = self.find(pair)
            first, low, high = (self.refs["visits"][fact, visit] for fact in (FIRST, LOW, HIGH))
            if self.geometry.packing is None:
                sums = self.multiply(warpgroup, pair)
            else:
                group = self.refs["visits"][GROUP, visit]
                sums = self.multiply_few_bits(warpgroup, pair, group, column)
            staged = self.refs["staged"].at[warpgroup]
            if self.schedule.left == "weight":
                place = column + warpgroup * WGMMA_ROWS
                store_right_rows(self.refs["out"], sums, staged, first, low, high, place, STAGED)
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

    def multiply_few_bits(
        self, warpgroup: Array, pair: Array, group: Array, column: Array
    ) -> Array:
        """Returns the sums of a pair as `multiply` does; factors are loaded two turns ahead."""
        g, s, refs = self.geometry, self.schedule, self.refs
        packing, interpret = g.packing, self.interpret
        assert packing is not None
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)
        arrays = {name: refs[name] for name in packing.names}
        row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=PER_ROW)
        row += column + warpgroup * WGMMA_ROWS
        row = group * g.out + row if g.group_axis == 0 else row * g.groups + group

        def factors_of(turn: Array) -> list[Factors]:
            first = row * 0 + turn * s.chunk
            return turn_factors(arrays, row, first, s.chunk, packing, interpret=interpret)

        def add(sums: Array, codes: Ref, x: Ref, factors: list[Factors]) -> Array:
            if packing.scales_exactly(g.dtype):
                return add_widened(
                    sums, codes, x, factors, packing, scaled=True, interpret=interpret
                )
            ahead = int(s.window <= _FEW)
            return add_products(
                [sums], codes, x, [factors], packing, ahead=ahead, interpret=interpret
            )[0]

        def process_turn(
            turn: Array, carry: tuple[Array, list[Factors], list[Factors]]
        ) -> tuple[Array, list[Factors], list[Factors]]:
            sums, factors, following = carry
            slot = self.slot(pair * self.turns + turn)
            plgpu.barrier_wait(refs["arrived"].at[slot])
            sums = add(sums, refs["weights"].at[slot, own], refs["rows"].at[slot], factors)
            # Threads have read the codes by ordinary loads, which a copy into the stage must not overtake.
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["free"].at[slot])
            # Behind the fence, which waits for all loads before it.
            return sums, following, factors_of(turn + 2)

        zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, s.width), jnp.float32), WGMMA)
        carry = zeros, factors_of(jnp.int32(0)), factors_of(jnp.int32(1))
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.turns), process_turn, carry)[0]
