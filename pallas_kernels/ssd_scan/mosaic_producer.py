"""Producer warpgroup of the `ssd_scan` kernel: it copies the pieces, zeroes rows past their ends and weighs tokens.

Tokens' weights depend on no state. So this warpgroup computes those of the next piece while the consumers process one.
"""

from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_weights import Weights


class Producer(Weights):
    """The producer warpgroup."""

    def run(self) -> None:
        """Prepares all pieces for the consumers."""
        for stage in range(self.kernel.schedule.stages):
            self.start(jnp.int32(stage))
        pl.when(self.task.pieces > 0)(lambda: self.with_squares(self.prepare, 1))
        if self.kernel.interpret:
            self.drain()

    def prepare(self, products: Ref) -> None:
        """Prepares the pieces with an accumulator for C times B."""
        stages = self.kernel.schedule.stages
        self.multiply_c_b(jnp.int32(0), products)
        products[...] = self.result(products, 0)

        @pl.loop(0, self.task.pieces)
        def _(number: Array) -> None:
            self.weigh(self.slot(number), products)
            refill = partial(self.start, number - 1 + stages, number > 0)
            if stages > 2:
                # The stage of the piece before this one is filled while the next piece's product runs.
                self.multiply_c_b(number + 1, products)
                refill()
            else:
                # The product waits for the very piece that this stage is filled with.
                refill()
                self.multiply_c_b(number + 1, products)
            # With a product in flight at the end of a turn, the compiler would serialise all of them (C7510).
            products[...] = self.result(products, 0)

    def drain(self) -> None:
        """Waits for what is released last; the interpreter requires a wait for each completion of a barrier."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_wait(self.refs["free"].at[slot])
        for consumer in range(self.kernel.schedule.consumers):
            plgpu.barrier_wait(self.refs["weights_free"].at[consumer])

    def start(self, number: Array, wanted: Array | bool = True) -> None:
        """Starts the copies of a piece, if wanted and if the row has it, once its stage is free."""

        def fetch() -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(self.refs["free"].at[slot])
            start, length = self.task.piece(number)
            self.fetch(slot, start, number, whole=length == SIDE)

        @pl.when(wanted & (number < self.task.pieces))
        def _() -> None:
            on_warps(fetch, interpret=self.kernel.interpret)

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
        pl.when(~whole)(lambda: self.fetch_inputs(slot, start, refs["to_clear"].at[slot]))

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

    def multiply_c_b(self, number: Array, products: Ref) -> None:
        """Waits for a piece and issues its products of C and B.

        An accumulator is not changed under a condition. So behind the last piece the products are of what is left in
        the next stage, which is not filled any more, and they are not read.
        """
        slot = self.slot(number)
        pl.when(number < self.task.pieces)(lambda: self.receive(number))
        products[...] = self.zeros()
        for block in range(self.geometry.blocks):
            c, b = (self.refs[name].at[slot, block] for name in ("c", "b"))
            self.multiply(products, c, b, right_transposed=True)

    def receive(self, number: Array) -> None:
        """Waits until a piece has arrived, and zeroes rows past its end."""
        slot, (_, length) = self.slot(number), self.task.piece(number)
        pl.when(length < SIDE)(lambda: self.clear(slot, length))
        plgpu.barrier_wait(self.refs["arrived"].at[slot])

    def clear(self, slot: Array, length: Array) -> None:
        """Zeroes rows past the piece's end, because 0 * NaN is NaN, and then signals that the piece has arrived."""
        refs, g = self.refs, self.geometry
        plgpu.barrier_wait(refs["to_clear"].at[slot])
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
