"""Producer warpgroup of the `ssd_scan` kernel: it issues all TMA copies and zeroes rows past a piece's end."""

from collections.abc import Mapping

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_task import Task, Worker


class Producer(Worker):
    """The producer warpgroup."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        super().__init__(kernel, refs)
        self.task = Task(kernel, refs, lax.axis_index("block"))

    def run(self) -> None:
        """Copies all pieces, each once its stage is free."""
        task, free = self.task, self.refs["free"]

        @pl.loop(0, task.pieces)
        def _(number: Array) -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(free.at[slot])
            start, length = task.piece(number)
            self.fetch(slot, start, number, whole=length == SIDE)
            pl.when(length < SIDE)(lambda: self.clear(slot, length))

        if self.kernel.interpret:
            self.drain()

    def drain(self) -> None:
        """Waits until all stages are released; the interpreter requires a wait for each completion of a barrier."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_wait(self.refs["free"].at[slot])

    def start(self, number: Array) -> None:
        """Starts the copies of a piece, if the row has it, for a consumer of a block without a producer."""

        def fetch() -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(self.refs["free"].at[slot])
            start, length = self.task.piece(number)
            self.fetch(slot, start, number, whole=length == SIDE)

        @pl.when(number < self.task.pieces)
        def _() -> None:
            on_warps(fetch, interpret=self.kernel.interpret)

    def finish(self, number: Array) -> None:
        """Zeroes what is past the end of a piece that `start` fetched."""
        _, length = self.task.piece(number)
        pl.when(length < SIDE)(lambda: self.clear(self.slot(number), length))

    def to_clear(self, slot: Array) -> Ref:
        """Returns the barrier that the copies of a partial piece signal."""
        barrier = self.refs["to_clear"]
        return barrier if self.kernel.has_producer else barrier.at[slot]

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
        pl.when(~whole)(lambda: self.fetch_inputs(slot, start, self.to_clear(slot)))

    def fetch_inputs(self, slot: Array, start: Array, arrived: Ref) -> None:
        """Starts the copies of B and x, the inputs of the state, whose rows past a piece's end must be zeroed."""
        refs, g, task = self.refs, self.geometry, self.task
        for block in range(g.blocks):
            column = g.sizes.d_inner + task.group * g.sizes.d_state + block * SIDE
            self.copy(start, column, refs["b_copied"].at[slot, block], arrived)
        for consumer in range(self.kernel.schedule.consumers):
            _, column = task.unit(consumer)
            self.copy(start, column, refs["x_copied"].at[slot, consumer], arrived)

    def copy(self, start: Array, column: Array, square: Ref, arrived: Ref) -> None:
        """Starts the copy of one 64 x 64 square."""
        source = self.refs["xbc"].at[pl.ds(start, SIDE), pl.ds(column, SIDE)]
        plgpu.copy_gmem_to_smem(source, square, arrived)

    def clear(self, slot: Array, length: Array) -> None:
        """Zeroes rows past the piece's end, because 0 * NaN is NaN, and then signals the consumers."""
        refs, g = self.refs, self.geometry
        plgpu.barrier_wait(self.to_clear(slot))
        squares = [refs["b"].at[slot, block] for block in range(g.blocks)]
        squares += [
            refs["x"].at[slot, consumer] for consumer in range(self.kernel.schedule.consumers)
        ]
        for square in squares:
            held = plgpu.load(square, layout=WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=WGMMA)
            assign(square, ..., jnp.where(row < length, held, jnp.zeros_like(held)))
        plgpu.commit_smem()
        for _square in squares:
            plgpu.barrier_arrive(refs["arrived"].at[slot])
