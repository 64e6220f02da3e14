"""A consumer of the `ssd_scan` kernel: the warpgroup that multiplies, for 64 components of a head.

It keeps outputs turned, a row for each component and a column for each token. So x, weighed x and the state that is
read are multiplied out of registers, and only the tokens' weights go through shared memory, whose bandwidth is short.

Names: `passed` is the base-2 logarithm of what is left, after each token of a piece, of the state before it; `less` is
that less the logarithm of the token's step, so that `exp2(passed[i] - less[j])` is the share of token j's input in the
state after token i.

Nothing but the barriers that are written out holds the four warps together. What they put down for one another, weights
and factors, they read before the outputs of the same piece are stored, and that waits for all of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_COLUMN, PER_ROW, WGMMA
from pallas_kernels.mosaic.warps import pause
from pallas_kernels.ssd_scan.mosaic_multiplier import LESS, PASSED, SQUARE, Multiplier
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE

# Columns that a thread's registers have side by side.
_EIGHT = 8
# How much later other consumers than the first begin, about half of what a piece takes, and from how many pieces on.
_LATE_NS, _LONG = 1200, 8
# Squares of the state that are rounded at a time: more of them fill the registers.
_ROUNDED = 2


class Consumer(Multiplier):
    """One of the warpgroups that multiply."""

    def run(self) -> None:
        """Takes the state through all pieces; gives zeros to the tokens of no row."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        pl.when(self.task.pieces > 0)(
            lambda: self.with_squares(self.scan, 2 + self.geometry.blocks)
        )
        pl.when(self.task.row.owned == 0)(self.write_zeros)

    def scan(self, met: Ref, read: Ref, *state: Ref) -> None:
        """Goes through the pieces of a row."""
        # Consumers in step would all want the tensor cores at once, and then all none.
        is_late = (self.number > 0) & (self.task.pieces >= _LONG)
        pl.when(is_late)(partial(pause, _LATE_NS, interpret=self.kernel.interpret))
        for ref, part in zip(state, self.begun(), strict=True):
            ref[...] = part

        @pl.loop(0, self.task.pieces)
        def _(number: Array) -> None:
            self.visit(number, met, read, state)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.write_state(self.task.row.write, [self.result(part, 0) for part in state])

    def visit(self, number: Array, met: Ref, read: Ref, state: Sequence[Ref]) -> None:
        """Takes the state through one piece, one product after the other."""
        slot = self.slot(number)
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        self.put_factors(slot)
        self.put_weights(slot, met)
        # Factors and weights may be read after this.
        plgpu.commit_smem()
        self.read_from(slot, read, state)
        x = self.load_turned(slot)
        # What passes the state by is added unrounded: as a weight it would lose its last digits.
        decayed = self.result(read, 0) * self.factors(PASSED)
        read[...] = decayed + x.astype(jnp.float32) * self.skip()
        weights = self.refs["weights"].at[self.number]
        for part in range(weights.shape[0]):
            self.multiply(read, x, weights.at[part], right_transposed=True)
        self.grow(slot, state, x)
        out = self.result(read, len(state)).astype(self.geometry.dtype)
        start, length = self.task.piece(number)
        self.store(out, start, length)
        ended = [self.result(part, 0) for part in state]
        plgpu.barrier_arrive(self.refs["free"].at[slot])
        self.keep(number, ended)

    def put_factors(self, slot: Array) -> None:
        """Puts down what is left after each token, and what of it reaches the piece's end: one number per thread."""
        decay = self.refs["decay"].at[slot, self.number]
        if self.kernel.interpret:
            held = decay[...]
            token = jnp.arange(2 * SIDE, dtype=jnp.int32)
        else:
            layout = plgpu.Layout.WG_STRIDED((2 * SIDE,), vec_size=1)
            held = plgpu.load(decay, layout=layout, optimized=False)
            token = plgpu.broadcasted_iota(jnp.int32, (2 * SIDE,), 0, layout=layout)
        exponents = jnp.where(token < SIDE, held, decay[SIDE - 1] - held)
        self.refs["factors"].at[self.number][...] = jnp.exp2(exponents)

    def factors(self, row: Any) -> Array:  # noqa: ANN401 - a slice of a private type
        """Returns one of the two rows of factors, repeated for all components."""
        return broadcast(
            load(self.refs["factors"].at[self.number, row], PER_COLUMN), SQUARE, 1, WGMMA
        )

    def put_weights(self, slot: Array, met: Ref) -> None:
        """Puts down what each token reads of each, and what rounding took of it."""
        met[...] = self.zeros()
        for block in range(self.geometry.blocks):
            c, b = (self.refs[name].at[slot, block] for name in ("c", "b"))
            self.multiply(met, c, b, right_transposed=True)
        decay = self.refs["decay"].at[slot, self.number]
        columns = self.columns_of_weights(met, decay)
        dtype = self.geometry.dtype
        # Otherwise a compiler may take what was rounded for what it was before.
        rounded = [lax.optimization_barrier(column.astype(dtype)) for column in columns]
        weights = self.refs["weights"].at[self.number]
        weights.at[0][...] = lax.concatenate(rounded, 1)
        if self.kernel.schedule.exact:
            pairs = zip(columns, rounded, strict=True)
            lost = [(column - near.astype(jnp.float32)).astype(dtype) for column, near in pairs]
            weights.at[1][...] = lax.concatenate(lost, 1)

    def columns_of_weights(self, met: Ref, decay: Ref) -> list[Array]:
        """Returns what each token reads of 8 others, in order; the numbers of 8 columns need no registers."""
        passed = load(decay.at[PASSED], PER_ROW)
        less = broadcast(load(decay.at[LESS], PER_COLUMN), SQUARE, 1, WGMMA)
        products = self.result(met, 0)
        shape = (SIDE, _EIGHT)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        distance = row - plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        passed = broadcast(passed, shape, 0, WGMMA)
        parts = []
        for first in range(0, SIDE, _EIGHT):
            cut = (0, first), (SIDE, first + _EIGHT)
            now, ends = (lax.slice(each, *cut) for each in (products, less))
            part = jnp.where(distance >= first, now * jnp.exp2(passed - ends), 0.0)
            # Otherwise the compiler would round first and take pairs of numbers apart to select.
            parts.append(lax.optimization_barrier(part))
        return parts

    def read_from(self, slot: Array, read: Ref, state: Sequence[Ref]) -> None:
        """Starts reading a piece's outputs from the state before it."""
        read[...] = self.zeros()
        for first in range(0, len(state), _ROUNDED):
            some = state[first : first + _ROUNDED]
            before = [self.result(part, 0).astype(self.geometry.dtype) for part in some]
            for block, part in enumerate(before, first):
                self.multiply(read, part, self.refs["c"].at[slot, block], right_transposed=True)

    def load_turned(self, slot: Array) -> Array:
        """Loads x, its columns as rows."""
        square = self.refs["x"].at[slot, self.number]
        if self.kernel.interpret:
            return square[...].T
        return plgpu.load(square.transpose((1, 0)), layout=WGMMA)

    def grow(self, slot: Array, state: Sequence[Ref], x: Array) -> None:
        """Starts adding a piece's inputs to the state."""
        weighed = (x.astype(jnp.float32) * self.factors(LESS)).astype(self.geometry.dtype)
        kept = jnp.exp2(self.refs["decay"][slot, self.number, SIDE - 1])
        for block, part in enumerate(state):
            # Nothing has been in flight for the state since the last piece.
            part[...] = self.result(part, None) * kept
            self.multiply(part, weighed, self.refs["b"].at[slot, block])

    def store(self, out: Array, start: Array, length: Array) -> None:
        """Stores outputs: all at once, or token by token where other rows' are behind them."""
        refs, columns = self.refs, pl.ds(self.column, SIDE)
        # The copy of the piece before reads from the same place.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.put(out)
        plgpu.commit_smem()

        @pl.when(length == SIDE)
        def _() -> None:
            target = refs["out"].at[pl.ds(start, SIDE), columns]
            plgpu.copy_smem_to_gmem(refs["y_copied"].at[self.number], target)

        @pl.when(length < SIDE)
        def _() -> None:
            self.put_rows()

            @pl.loop(0, length)
            def _(token: Array) -> None:
                source = refs["y_rows"].at[self.number, pl.ds(token, 1)]
                target = refs["out"].at[pl.ds(start + token, 1), columns]
                plgpu.copy_smem_to_gmem(source, target)

    def put(self, out: Array) -> None:
        """Puts outputs where they are copied from, turned back."""
        square = self.refs["y"].at[self.number]
        if self.kernel.interpret:
            square[...] = out.T
            return
        square.transpose((1, 0))[...] = out

    def put_rows(self) -> None:
        """Puts outputs down again, each token's on its own."""
        if self.kernel.interpret:
            return
        held = plgpu.load(self.refs["y"].at[self.number], layout=WGMMA)
        # All warps have loaded theirs before any puts them down in the same place.
        plgpu.commit_smem()
        self.refs["y_rows"].at[self.number][...] = held
        plgpu.commit_smem()

    def write_zeros(self) -> None:
        """Gives zeros to the tokens of no row."""
        row = self.task.row

        @pl.loop(0, lax.div(row.stop - row.start + (SIDE - 1), jnp.int32(SIDE)))
        def _(number: Array) -> None:
            start = row.start + number * SIDE
            zeros = self.zeros().astype(self.geometry.dtype)
            self.store(zeros, start, jnp.minimum(row.stop - start, SIDE))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
