"""Consumer warpgroup of the `ssd_scan` kernel: the scan over a row's pieces for 64 components of a head.

Outputs are kept transposed, a row for each component and a column for each token. So x, weighted x and the state are
left operands in registers, and only the tokens' weights go through shared memory, whose bandwidth is scarce.

Names: `passed` is the base-2 logarithm of the decay of the piece's initial state up to and including each token. `less`
is `passed` minus the base-2 logarithm of the token's step, so that `exp2(passed[i] - less[j])` is the factor of token
j's input in the state after token i.

The four warps synchronise only at the explicit barriers. Weights and factors, which they exchange through shared
memory, are read before the outputs of the same piece are stored, and that store waits for all warps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.piece_store import OutputSquare
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_COLUMN, PER_ROW, WGMMA
from pallas_kernels.mosaic.warps import pause
from pallas_kernels.ssd_scan.mosaic_multiplier import LESS, PASSED, SQUARE, Multiplier
from pallas_kernels.ssd_scan.mosaic_producer import Producer
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE

# Columns of one step of `columns_of_weights`: the granularity of wgmma's register layout.
_EIGHT = 8
# Delay in nanoseconds of the second consumer's start, about half of a piece's time, and the least pieces for it.
_LATE_NS, _LONG = 1200, 8
# Squares of the state that are rounded at a time; more would exceed the registers.
_ROUNDED = 2


class Consumer(Multiplier):
    """A consumer warpgroup."""

    def run(self) -> None:
        """Processes all pieces of the row; writes zeros for padding tokens."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        for stage in range(self.kernel.schedule.stages):
            self.fetching(Producer.start, jnp.int32(stage))
        pl.when(self.task.pieces > 0)(
            lambda: self.with_squares(self.scan, 2 + self.geometry.blocks)
        )
        pl.when(self.task.row.owned == 0)(self.write_zeros)
        if self.kernel.interpret:
            self.fetching(Producer.drain)

    def fetching(self, job: Callable[..., None], *arguments: Array) -> None:
        """Runs a job of the producer in the first consumer, if there is no producer."""
        if not self.kernel.has_producer:
            pl.when(self.number == 0)(partial(job, Producer(self.kernel, self.refs), *arguments))

    def scan(self, met: Ref, read: Ref, *state: Ref) -> None:
        """Processes the pieces of a row with accumulators for weights, outputs and state."""
        # Consumers in phase would compete for the tensor cores, and then leave them idle together.
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
        """Processes one piece, one product after the other."""
        slot = self.slot(number)
        self.fetching(Producer.finish, number)
        plgpu.barrier_wait(self.refs["arrived"].at[slot])
        self.put_factors(slot)
        self.put_weights(slot, met)
        # Factors and weights are visible to all warps after this barrier.
        plgpu.commit_smem()
        self.read_from(slot, read, state)
        x = self.load_turned(slot)
        # The skip connection is added in float32: as part of the rounded weights it would lose precision.
        decayed = self.result(read, 0) * self.factors(PASSED)
        read[...] = decayed + x.astype(jnp.float32) * self.skip()
        weights = self.refs["weights"].at[self.number]
        for part in range(weights.shape[0]):
            self.multiply(read, x, weights.at[part], right_transposed=True)
        self.update_state(slot, state, x)
        out = self.result(read, len(state)).astype(self.geometry.dtype)
        start, length = self.task.piece(number)
        self.store(out, start, length)
        ended = [self.result(part, 0) for part in state]
        plgpu.barrier_arrive(self.refs["free"].at[slot])
        self.fetch_ahead(number)
        self.keep(number, ended)

    def fetch_ahead(self, number: Array) -> None:
        """Without a producer, fetches into the stage of the previous piece, which both consumers have released."""
        if not self.kernel.has_producer:
            following = number - 1 + self.kernel.schedule.stages
            pl.when(number > 0)(partial(self.fetching, Producer.start, following))

    def put_factors(self, slot: Array) -> None:
        """Stores the decay factors of outputs (exp2(passed)) and of inputs (exp2(end - less)), one per thread."""
        decay = self.refs["decay"].at[slot, self.number]
        if self.kernel.interpret:
            held = decay[...]
            token = jnp.arange(2 * SIDE, dtype=jnp.int32)
        else:
            layout = plgpu.Layout.WG_STRIDED((2 * SIDE,), vec_size=1)
            held = plgpu.load(decay, layout=layout, optimized=False)
            token = plgpu.broadcasted_iota(jnp.int32, (2 * SIDE,), 0, layout=layout)
        exponents = jnp.where(token < SIDE, held, decay[SIDE - 1] - held)
        assign(self.refs["factors"].at[self.number], ..., jnp.exp2(exponents))

    def factors(self, row: Any) -> Array:  # noqa: ANN401 - a slice of a private type
        """Loads one of the two rows of factors, broadcast over all components."""
        return broadcast(
            load(self.refs["factors"].at[self.number, row], PER_COLUMN), SQUARE, 1, WGMMA
        )

    def put_weights(self, slot: Array, met: Ref) -> None:
        """Stores the tokens' weights in shared memory: rounded, and if exact their rounding errors."""
        met[...] = self.zeros()
        for block in range(self.geometry.blocks):
            c, b = (self.refs[name].at[slot, block] for name in ("c", "b"))
            self.multiply(met, c, b, right_transposed=True)
        decay = self.refs["decay"].at[slot, self.number]
        columns = self.columns_of_weights(met, decay)
        dtype = self.geometry.dtype
        # Without the barrier the compiler may elide the rounding.
        rounded = [lax.optimization_barrier(column.astype(dtype)) for column in columns]
        weights = self.refs["weights"].at[self.number]
        assign(weights.at[0], ..., lax.concatenate(rounded, 1))
        if self.kernel.schedule.exact:
            pairs = zip(columns, rounded, strict=True)
            lost = [(column - near.astype(jnp.float32)).astype(dtype) for column, near in pairs]
            assign(weights.at[1], ..., lax.concatenate(lost, 1))

    def columns_of_weights(self, met: Ref, decay: Ref) -> list[Array]:
        """Returns the tokens' weights, 8 columns at a time; indices of only 8 columns are constants, not registers."""
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
            # Without the barrier the compiler would round before the select, and split packed pairs for it.
            parts.append(lax.optimization_barrier(part))
        return parts

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

    def update_state(self, slot: Array, state: Sequence[Ref], x: Array) -> None:
        """Decays the state and issues the products that add the piece's inputs to it."""
        weighed = (x.astype(jnp.float32) * self.factors(LESS)).astype(self.geometry.dtype)
        kept = jnp.exp2(self.refs["decay"][slot, self.number, SIDE - 1])
        for block, part in enumerate(state):
            # No product for the state has been in flight since the previous piece.
            part[...] = self.result(part, None) * kept
            self.multiply(part, weighed, self.refs["b"].at[slot, block])

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
