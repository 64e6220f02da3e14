"""Consumer warpgroup of the `ssd_scan` kernel: the scan over a row's pieces for 64 components of a head.

Outputs are kept transposed, a row for each component and a column for each token. So x, weighted x and the state are
left operands in registers, and only the tokens' weights, which the producer computes (mosaic_weights.py), go through
shared memory, whose bandwidth is scarce.
"""

from collections.abc import Mapping, Sequence

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.piece_store import OutputSquare
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import load
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_multiplier import LESS, PASSED, Multiplier
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE

# Squares of the state that are rounded at a time; more would exceed the registers.
_ROUNDED = 2


class Consumer(Multiplier):
    """A consumer warpgroup, for one unit of the block."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        super().__init__(kernel, refs, number)
        self.head, self.column = self.task.unit(number)

    def run(self) -> None:
        """Processes all pieces of the row; writes zeros for padding tokens."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        plgpu.barrier_arrive(self.refs["weights_free"].at[self.number])
        pl.when(self.task.pieces > 0)(
            lambda: self.with_squares(self.scan, 1 + self.geometry.blocks)
        )
        pl.when(self.task.row.owned == 0)(self.write_zeros)

    def scan(self, read: Ref, *state: Ref) -> None:
        """Processes the pieces of a row with accumulators for outputs and state."""
        for ref, part in zip(state, self.begun(), strict=True):
            ref[...] = part

        @pl.loop(0, self.task.pieces)
        def _(number: Array) -> None:
            self.visit(number, read, state)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.write_state(self.task.row.write, [self.result(part, 0) for part in state])

    def visit(self, number: Array, read: Ref, state: Sequence[Ref]) -> None:
        """Processes one piece."""
        slot, factors = self.slot(number), self.refs["factors"].at[self.number]
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        self.read_from(slot, read, state)
        x = self.load_turned(slot)
        plgpu.barrier_wait(self.refs["weighed"].at[self.number])
        # The skip connection is added in float32: as part of the rounded weights it would lose precision.
        decayed = self.result(read, 0) * self.per_column(factors.at[PASSED])
        read[...] = decayed + x.astype(jnp.float32) * self.skip()
        weights = self.refs["weights"].at[self.number]
        for part in range(weights.shape[0]):
            self.multiply(read, x, weights.at[part], right_transposed=True)
        inputs = x.astype(jnp.float32) * self.per_column(factors.at[LESS])
        self.update_state(slot, state, inputs.astype(self.geometry.dtype))
        out = self.result(read, len(state)).astype(self.geometry.dtype)
        plgpu.barrier_arrive(self.refs["weights_free"].at[self.number])
        start, length = self.task.piece(number)
        self.store(out, start, length)
        ended = [self.result(part, 0) for part in state]
        plgpu.barrier_arrive(self.refs["free"].at[slot])
        self.keep(number, ended)

    def read_from(self, slot: Array, read: Ref, state: Sequence[Ref]) -> None:
        """Issues the products of the state before the piece with C."""
        read[...] = self.zeros()
        for first in range(0, len(state), _ROUNDED):
            some = state[first : first + _ROUNDED]
            before = [self.result(part, 0).astype(self.geometry.dtype) for part in some]
            for block, part in enumerate(before, first):
                self.multiply(read, part, self.refs["c"].at[slot, block], right_transposed=True)

    def load_turned(self, slot: Array) -> Array:
        """Loads the transpose of x."""
        square = self.refs["x"].at[slot, self.number]
        if self.kernel.interpret:
            return square[...].T
        return plgpu.load(square.transpose((1, 0)), layout=WGMMA)

    def skip(self) -> Array:
        """Returns the head's factor of the skip connection."""
        return self.refs["d"][self.head].astype(jnp.float32)

    def update_state(self, slot: Array, state: Sequence[Ref], inputs: Array) -> None:
        """Decays the state and issues the products that add the piece's weighted inputs to it."""
        kept = jnp.exp2(self.refs["decay"][slot, self.number, SIDE - 1])
        for block, part in enumerate(state):
            # No product for the state has been in flight since the previous piece.
            part[...] = self.result(part, None) * kept
            self.multiply(part, inputs, self.refs["b"].at[slot, block])

    def store(self, out: Array, start: Array, length: Array) -> None:
        """Stores the outputs of a piece."""
        square = OutputSquare(
            copied=self.refs["y_copied"].at[self.number],
            tiled=self.refs["y"].at[self.number],
            rows=self.refs["y_rows"].at[self.number],
            target=self.refs["out"],
            columns=pl.ds(self.column, SIDE),
        )
        square.store(out, start, length, interpret=self.kernel.interpret)

    def write_zeros(self) -> None:
        """Writes zeros as the outputs of padding tokens."""
        row = self.task.row

        @pl.loop(0, lax.div(row.stop - row.start + (SIDE - 1), jnp.int32(SIDE)))
        def _(number: Array) -> None:
            start = row.start + number * SIDE
            zeros = self.zeros().astype(self.geometry.dtype)
            self.store(zeros, start, jnp.minimum(row.stop - start, SIDE))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def places(self, state: Array) -> list[Ref]:
        """Returns refs to the squares of a state in the pool."""
        rows = pl.ds(self.column - self.head * self.geometry.sizes.head_dim, SIDE)
        pool = self.refs["states"]
        return [
            pool.at[state, self.head, rows, pl.ds(block * SIDE, SIDE)]
            for block in range(self.geometry.blocks)
        ]

    def exists(self, state: Array) -> Array:
        """Returns whether the id is a state of the pool."""
        return (state >= 0) & (state < self.refs["states"].shape[0])

    def begun(self) -> list[Array]:
        """Returns the row's initial state in float32, zeros for an id past the end."""
        read = self.task.row.read
        known = self.exists(read)
        squares = self.places(jnp.where(known, read, 0))
        loaded = [load(square, WGMMA) for square in squares]
        return [jnp.where(known, part.astype(jnp.float32), 0.0) for part in loaded]

    def keep(self, number: Array, state: Sequence[Array]) -> None:
        """Writes the state after piece `number` as a snapshot, if there is one."""
        if "kept" in self.refs:
            self.write_state(self.refs["kept"][self.task.first_piece + number], state)

    def write_state(self, place: Array, state: Sequence[Array]) -> None:
        """Writes a state to the pool, unless the id is past the end."""

        @pl.when(self.exists(place))
        def _() -> None:
            for ref, part in zip(self.places(place), state, strict=True):
                assign(ref, ..., part.astype(self.geometry.state_dtype))
