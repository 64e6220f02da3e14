"""The Mosaic GPU kernel of `ssd_scan` for Hopper: what it is built from, and who does what in a block.

A block takes a row and one or two units (64 components of a head) of one group through the row's pieces, with the state
on chip. Its consumers (mosaic_consumer.py) multiply, each for one unit; a producer keeps the pieces' tokens in flight,
B and C once for all. Rows begin anywhere, and copies into swizzled shared memory do so only where the tile is not
divided by rows; so tokens are copied as if it was not, and multiplied as if it was, which are the same bytes.

Refs to whole arrays are named like the arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_rows import INTERPRETED
from pallas_kernels.ssd_scan.mosaic_consumer import Consumer
from pallas_kernels.ssd_scan.mosaic_schedule import REGISTERS, SIDE, Geometry, Schedule
from pallas_kernels.ssd_scan.mosaic_task import Ref, Task, Worker

# What makes transforms whole classes is private to JAX.
_transform: Any = plgpu
_SWIZZLED = (_transform.SwizzleTransform(128),)
_TILED = (_transform.TilingTransform((8, SIDE)), _transform.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and schedule."""

    geometry: Geometry
    schedule: Schedule
    has_snapshots: bool
    interpret: bool

    def build(self, tokens: int, num_tasks: int) -> Callable[..., Array]:
        """Returns the function of arrays and of the pool's ref that launches the kernel."""
        g, s = self.geometry, self.schedule
        return plgpu.kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct((tokens, g.sizes.d_inner), g.dtype),
            scratch_types=self._scratch(),
            grid=(num_tasks * g.packs(s.consumers),),
            grid_names=("block",),
            num_threads=s.consumers + 1,
            thread_name="warpgroup",
            # Each place that needs a barrier between warps says so.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,
            ),
            interpret=INTERPRETED if self.interpret else None,
            kernel_name="ssd_scan",
        )

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule
        square = (SIDE, SIDE)
        copied = {
            "b": (s.stages, g.blocks, *square),
            "c": (s.stages, g.blocks, *square),
            "x": (s.stages, s.consumers, *square),
            "y": (s.consumers, *square),
        }
        scratch: dict[str, Any] = {
            "weights": plgpu.SMEM((s.consumers, 1 + s.exact, *square), g.dtype, transforms=_TILED),
            "factors": plgpu.SMEM((s.consumers, 2 * SIDE), jnp.float32),
            "decay": plgpu.SMEM((s.stages, s.consumers, 2 * SIDE), jnp.float32),
            "arrived": plgpu.Barrier(
                num_arrivals=2 * (g.blocks + s.consumers), num_barriers=s.stages
            ),
            # Where a piece is short, B and x arrive at the producer, which clears what is behind it.
            "to_clear": plgpu.Barrier(num_arrivals=g.blocks + s.consumers),
            "free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
        }
        if self.interpret:
            # The interpreter knows no accumulators.
            sums = (s.consumers, 2 + g.blocks, *square)
            scratch["sums"] = plgpu.SMEM(sums, jnp.float32)
        for name, shape in copied.items():
            if self.interpret:
                # The interpreter takes any two places of a union for the same.
                scratch[name] = plgpu.SMEM(shape, g.dtype)
                continue
            views = [plgpu.SMEM(shape, g.dtype, transforms=form) for form in (_SWIZZLED, _TILED)]
            views += [plgpu.SMEM(shape, g.dtype)] if name == "y" else []
            scratch[name] = plgpu.RefUnion(*views)
        return scratch

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        names = ["xbc", "decays", "d", "tasks"] + ["kept"] * self.has_snapshots
        found = dict(zip([*names, "states", "out"], refs, strict=True)) | scratch
        for name in ("b", "c", "x", "y"):
            views = (found[name],) * 3 if self.interpret else tuple(found[name])
            # Copied in or out whole, multiplied or held in registers, copied out by rows.
            found |= dict(zip((f"{name}_copied", name, f"{name}_rows"), views, strict=False))
        warpgroup = lax.axis_index("warpgroup")
        consumers, registers = self.schedule.consumers, REGISTERS[self.schedule.consumers]

        @pl.when(warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(registers[0], action="increase")
            Consumer(self, found, warpgroup).run()

        @pl.when(warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(registers[1], action="decrease")
            _Producer(self, found).run()


class _Producer(Worker):
    """The warpgroup that starts all copies into shared memory."""

    def __init__(self, kernel: "Kernel", refs: Mapping[str, Ref]) -> None:
        super().__init__(kernel, refs)
        self.task = Task(kernel, refs, lax.axis_index("block"))

    def run(self) -> None:
        """Fetches all pieces."""
        task, free = self.task, self.refs["free"]

        @pl.loop(0, task.pieces)
        def _(number: Array) -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(free.at[slot])
            start, length = task.piece(number)
            self.fetch(slot, start, number, whole=length == SIDE)
            pl.when(length < SIDE)(lambda: self.clear(slot, length))

        if self.kernel.interpret:
            # The interpreter wants each completion to be waited for.
            for slot in range(self.kernel.schedule.stages):
                plgpu.barrier_wait(free.at[slot])

    def fetch(self, slot: Array, start: Array, number: Array, whole: Array) -> None:
        """Starts the copies of one piece."""
        refs, g, task = self.refs, self.geometry, self.task
        arrived = refs["arrived"].at[slot]
        for block in range(g.blocks):
            column = g.sizes.first_c + task.group * g.sizes.d_state + block * SIDE
            self.copy(start, column, refs["c_copied"].at[slot, block], arrived)
        for consumer in range(self.kernel.schedule.consumers):
            head, _ = task.unit(consumer)
            source = refs["decays"].at[task.first_piece + number, head]
            plgpu.copy_gmem_to_smem(source, refs["decay"].at[slot, consumer], arrived)
        pl.when(whole)(lambda: self.fetch_inputs(slot, start, arrived))
        pl.when(~whole)(lambda: self.fetch_inputs(slot, start, refs["to_clear"]))

    def fetch_inputs(self, slot: Array, start: Array, arrived: Ref) -> None:
        """Starts the copies of what goes into the state: behind a piece's end it must be cleared."""
        refs, g, task = self.refs, self.geometry, self.task
        for block in range(g.blocks):
            column = g.sizes.d_inner + task.group * g.sizes.d_state + block * SIDE
            self.copy(start, column, refs["b_copied"].at[slot, block], arrived)
        for consumer in range(self.kernel.schedule.consumers):
            _, column = task.unit(consumer)
            self.copy(start, column, refs["x_copied"].at[slot, consumer], arrived)

    def copy(self, start: Array, column: Array, square: Ref, arrived: Ref) -> None:
        """Starts one copy."""
        source = self.refs["xbc"].at[pl.ds(start, SIDE), pl.ds(column, SIDE)]
        plgpu.copy_gmem_to_smem(source, square, arrived)

    def clear(self, slot: Array, length: Array) -> None:
        """Zeroes other rows' tokens, which a factor of zero would not do: it does not silence a NaN."""
        refs, g = self.refs, self.geometry
        plgpu.barrier_wait(refs["to_clear"])
        squares = [refs["b"].at[slot, block] for block in range(g.blocks)]
        squares += [
            refs["x"].at[slot, consumer] for consumer in range(self.kernel.schedule.consumers)
        ]
        for square in squares:
            held = plgpu.load(square, layout=WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=WGMMA)
            square[...] = jnp.where(row < length, held, jnp.zeros_like(held))
        plgpu.commit_smem()
        for _square in squares:
            plgpu.barrier_arrive(refs["arrived"].at[slot])
