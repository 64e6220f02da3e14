"""Consumer warpgroup of the `delta_scan` kernel: the scan over a row's pieces for 64 components of a head's values.

State, values, corrections and outputs are kept transposed, a row for each component. So they are left operands of
products, in registers, and all right operands are squares that were copied: queries, keys, and what `delta_systems`
found of the piece. The first consumer starts the copies of later pieces.
"""

from collections.abc import Mapping, Sequence

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_scan.mosaic_geometry import SIDE, STAGES
from pallas_kernels.delta_scan.mosaic_kernel import SQUARE, Kernel, zeros
from pallas_kernels.delta_scan.mosaic_system import ENDED, KNOWN, LEFT, READ
from pallas_kernels.delta_scan.mosaic_task import Task, in_first
from pallas_kernels.mosaic.accumulators import add_product, wait_for_products
from pallas_kernels.mosaic.piece_store import OutputSquare
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_COLUMN, WGMMA
from pallas_kernels.mosaic.turned import load_turned, store_turned


class Consumer:
    """A consumer warpgroup."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        self.kernel, self.geometry, self.refs, self.number = kernel, kernel.geometry, refs, number
        self.task = Task(kernel, refs)
        self.component = self.task.first_component(number)
        column = self.task.head * self.geometry.sizes.value_dim + self.component
        self.outputs = OutputSquare(
            copied=refs["y_copied"].at[number],
            tiled=refs["y"].at[number],
            rows=refs["y_rows"].at[number],
            target=refs["out"],
            columns=pl.ds(column, SIDE),
        )

    def run(self) -> None:
        """Processes all pieces of the row; writes zeros for padding tokens."""
        for slot in range(STAGES):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        for number in range(STAGES):
            in_first(self.number, self.task.start, jnp.int32(number))
        pl.when(self.task.pieces > 0)(self.with_squares)
        pl.when(self.task.row.owned == 0)(self.write_zeros)
        if self.kernel.interpret:
            in_first(self.number, self.task.drain)

    def with_squares(self) -> None:
        """Processes the pieces with accumulators for products of keys and queries, and for the state."""
        count = 2 + self.geometry.squares
        if not self.kernel.interpret:
            pl.run_scoped(self.scan, *[plgpu.ACC(SQUARE, jnp.float32)] * count)
            return
        self.scan(*(self.refs["sums"].at[self.number, index] for index in range(count)))

    def scan(self, found: Ref, read: Ref, *state: Ref) -> None:
        """Processes the pieces of the row."""
        for ref, part in zip(state, self.begun(), strict=True):
            ref[...] = part

        @pl.loop(0, self.task.pieces)
        def _(number: Array) -> None:
            self.visit(number, found, read, state)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.write_state(self.task.row.write, [self.result(part, 0) for part in state])

    def visit(self, number: Array, found: Ref, read: Ref, state: Sequence[Ref]) -> None:
        """Processes one piece."""
        slot = self.task.slot(number)
        in_first(self.number, self.task.finish, number)
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        start, length = self.task.row.piece(number, SIDE)
        self.multiply_state(slot, found, read, state)
        wanted = self.wanted(slot, length, self.result(found, len(state)))
        found[...] = zeros()
        self.multiply(found, wanted, self.refs["inverses"].at[slot], transposed=True)
        correction = self.result(found, 0)
        read[...] = self.result(read, 0) * self.factors(slot, READ)
        rounded = correction.astype(self.geometry.dtype)
        self.multiply(read, rounded, self.refs["weights"].at[slot], transposed=True)
        self.update_state(slot, state, correction)
        out = self.result(read, len(state)).astype(self.geometry.dtype)
        self.outputs.store(out, start, length, interpret=self.kernel.interpret)
        ended = [self.result(part, 0) for part in state]
        plgpu.barrier_arrive(self.refs["free"].at[slot])
        # Both consumers have released the stage of the previous piece.
        following = number - 1 + STAGES
        pl.when(number > 0)(lambda: in_first(self.number, self.task.start, following))
        self.keep(number, ended)

    def multiply_state(self, slot: Array, found: Ref, read: Ref, state: Sequence[Ref]) -> None:
        """Issues the products of keys, then of queries, with the state before the piece."""
        before = [self.result(part, 0).astype(self.geometry.dtype) for part in state]
        for name, total in (("k", found), ("q", read)):
            total[...] = zeros()
            for square, part in enumerate(before):
                self.multiply(total, part, self.refs[name].at[slot, square], transposed=True)

    def wanted(self, slot: Array, length: Array, known: Array) -> Array:
        """Returns values minus what the state before the piece has for their keys, zeros past the piece's end."""
        column = plgpu.broadcasted_iota(jnp.int32, SQUARE, 1, layout=WGMMA)
        missing = self.values(slot).astype(jnp.float32) - known * self.factors(slot, KNOWN)
        return jnp.where(column < length, missing, 0.0).astype(self.geometry.dtype)

    def values(self, slot: Array) -> Array:
        """Loads the transpose of the values."""
        square = self.refs["v"].at[slot, self.number]
        if self.kernel.interpret:
            return square[...].T
        return plgpu.load(square.transpose((1, 0)), layout=WGMMA)

    def update_state(self, slot: Array, state: Sequence[Ref], correction: Array) -> None:
        """Decays the state and issues the products that add the corrections to it."""
        left = (correction * self.factors(slot, LEFT)).astype(self.geometry.dtype)
        kept = self.refs["factors"][slot, ENDED * SIDE]
        for square, part in enumerate(state):
            # No product for the state has been in flight since the previous piece.
            part[...] = self.result(part, None) * kept
            self.multiply(part, left, self.refs["k"].at[slot, square])

    def factors(self, slot: Array, row: int) -> Array:
        """Loads one of the rows of factors, broadcast over all components."""
        held = self.refs["factors"].at[slot, pl.ds(row * SIDE, SIDE)]
        return broadcast(load(held, PER_COLUMN), SQUARE, 1, WGMMA)

    def multiply(self, total: Ref, left: Array, right: Ref, *, transposed: bool = False) -> None:
        """Issues the products that are added to an accumulator."""
        interpret = self.kernel.interpret
        add_product(total, left, right, transposed=transposed, interpret=interpret)

    def result(self, total: Ref, in_flight: int | None) -> Array:
        """Returns an accumulator's value after waiting until at most `in_flight` later products are pending."""
        return wait_for_products(total, in_flight, interpret=self.kernel.interpret)

    def places(self, state: Array) -> list[Ref]:
        """Returns refs to the squares of a state in the pool, a row for each component of a key."""
        columns = pl.ds(self.component, SIDE)
        return [
            self.refs["states"].at[state, self.task.head, pl.ds(square * SIDE, SIDE), columns]
            for square in range(self.geometry.squares)
        ]

    def exists(self, state: Array) -> Array:
        """Returns whether the id is a state of the pool."""
        return (state >= 0) & (state < self.refs["states"].shape[0])

    def begun(self) -> list[Array]:
        """Returns the row's initial state in float32, zeros for an id past the end."""
        read, interpret = self.task.row.read, self.kernel.interpret
        known = self.exists(read)
        places = self.places(jnp.where(known, read, 0))
        loaded = [load_turned(place, layout=WGMMA, interpret=interpret) for place in places]
        return [jnp.where(known, part.astype(jnp.float32), 0.0) for part in loaded]

    def keep(self, number: Array, state: Sequence[Array]) -> None:
        """Writes the state after piece `number` as a snapshot, if there is one."""
        if "kept" in self.refs:
            self.write_state(self.refs["kept"][self.task.row.first_piece + number], state)

    def write_state(self, place: Array, state: Sequence[Array]) -> None:
        """Writes a state to the pool, unless the id is past the end."""

        @pl.when(self.exists(place))
        def _() -> None:
            for ref, part in zip(self.places(place), state, strict=True):
                stored = part.astype(self.geometry.state_dtype)
                store_turned(ref, stored, layout=WGMMA, interpret=self.kernel.interpret)

    def write_zeros(self) -> None:
        """Writes zeros as the outputs of padding tokens."""
        row = self.task.row

        @pl.loop(0, lax.div(row.stop - row.start + (SIDE - 1), jnp.int32(SIDE)))
        def _(number: Array) -> None:
            start = row.start + number * SIDE
            length = jnp.minimum(row.stop - start, SIDE)
            nothing = zeros().astype(self.geometry.dtype)
            self.outputs.store(nothing, start, length, interpret=self.kernel.interpret)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
