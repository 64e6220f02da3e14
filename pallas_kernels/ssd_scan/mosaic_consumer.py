"""A consumer of the `ssd_scan` kernel: the warpgroup that multiplies, for 64 components of a head.

Names: `passed` is the base-2 logarithm of what is left, after each token of a piece, of the state before it; `less` is
that less the logarithm of the token's step, so that `exp2(passed[i] - less[j])` is the share of token j's input in the
state after token i. Squares have 64 rows and columns.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_task import Ref, Task, Worker

if TYPE_CHECKING:
    from pallas_kernels.ssd_scan.mosaic_block import Kernel

WGMMA = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
_SQUARE = (SIDE, SIDE)


class Consumer(Worker):
    """One of the warpgroups that multiply."""

    def __init__(self, kernel: "Kernel", refs: Mapping[str, Ref], number: Array) -> None:
        super().__init__(kernel, refs)
        self.number = number
        self.task = Task(kernel, refs, lax.axis_index("block"))
        self.head, self.column = self.task.unit(number)
        # A larger state leaves no registers for it.
        self.meets_early = self.geometry.blocks <= 2

    def run(self) -> None:
        """Takes the state through all pieces."""
        for slot in range(self.kernel.schedule.stages):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        pl.when(self.task.pieces > 0)(self.scan)
        pl.when(self.task.row.owned == 0)(self.write_zeros)

    def scan(self) -> None:
        """Goes through the pieces of a row."""

        def run(met: Ref, read: Ref, *state: Ref) -> None:
            begun = self.begun()
            for ref, part in zip(state, begun, strict=True):
                ref[...] = part
            self.publish(begun)
            first = jnp.int32(0)
            plgpu.barrier_wait(self.refs["arrived"].at[self.slot(first)])
            if self.meets_early:
                self.meet(first, met)
            weights = self.prepare(first, met, read)
            visit = partial(self.visit, met=met, read=read, state=state)
            lax.fori_loop(first, self.task.pieces, visit, weights)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.write_state(self.task.row.write, [self.result(part, 0) for part in state])

        self.with_squares(run, 2 + self.geometry.blocks)

    def with_squares(self, run: Callable[..., None], count: int) -> None:
        """Calls a function with squares that products are added to."""
        if not self.kernel.interpret:
            pl.run_scoped(run, *[plgpu.ACC(_SQUARE, jnp.float32)] * count)
            return
        run(*(self.refs["sums"].at[self.number, index] for index in range(count)))

    def visit(
        self, number: Array, weights: Array, *, met: Ref, read: Ref, state: Sequence[Ref]
    ) -> Array:
        """Takes the state through one piece, whose weights are known, and prepares the next one.

        What does not depend on the state runs ahead, so that it hides behind products that were started before. After
        the last piece it is prepared for once more, to no effect.
        """
        refs, blocks = self.refs, range(self.geometry.blocks)
        slot = self.slot(number)
        start, length = self.task.piece(number)
        x, decay = refs["x"].at[slot, self.number], refs["decay"].at[slot, self.number]
        left = _over_columns(jnp.exp2(_vector(decay.at[0], PER_ROW)))
        # What passes the state by is added unrounded: as a weight it would lose its last digits.
        read[...] = self.result(read, 0) * left + _load(x) * self.skip()
        self.multiply(read, weights, x)
        kept = jnp.exp2(decay[0, SIDE - 1])
        for block in blocks:
            # Nothing has been in flight for the state since the last piece.
            state[block][...] = self.result(state[block], None) * kept
            weighed, b = refs["weighed"].at[self.number], refs["b"].at[slot, block]
            self.multiply(state[block], weighed, b, left_transposed=True)
        following = jnp.minimum(number + 1, self.task.pieces - 1)
        arrived = refs["arrived"].at[self.slot(following)]
        pl.when(following > number)(lambda: plgpu.barrier_wait(arrived))
        early = len(blocks) if self.meets_early else 0
        if self.meets_early:
            self.meet(following, met)
        out = self.result(read, early + len(blocks)).astype(self.geometry.dtype)
        self.store(out, start, length)
        ended = [self.result(part, early) for part in state]
        self.publish(ended)
        plgpu.barrier_arrive(refs["free"].at[slot])
        self.keep(number, ended)
        return self.prepare(following, met, read)

    def meet(self, number: Array, met: Ref) -> None:
        """Starts the products of a piece's C and B."""
        slot = self.slot(number)
        met[...] = self.zeros()
        for block in range(self.geometry.blocks):
            c, b = (self.refs[name].at[slot, block] for name in ("c", "b"))
            self.multiply(met, c, b, right_transposed=True)

    def prepare(self, number: Array, met: Ref, read: Ref) -> Array:
        """Starts reading a piece's outputs from the state before it, weighs its inputs; returns their weights."""
        refs, blocks = self.refs, range(self.geometry.blocks)
        slot = self.slot(number)
        if not self.meets_early:
            self.meet(number, met)
        read[...] = self.zeros()
        for block in blocks:
            before = refs["state"].at[self.number, block]
            self.multiply(read, refs["c"].at[slot, block], before, right_transposed=True)
        x, decay = refs["x"].at[slot, self.number], refs["decay"].at[slot, self.number]
        to_end = _over_columns(jnp.exp2(decay[0, SIDE - 1] - _vector(decay.at[1], PER_ROW)))
        refs["weighed"].at[self.number][...] = (_load(x) * to_end).astype(self.geometry.dtype)
        plgpu.commit_smem()
        passed, less = _vector(decay.at[0], PER_ROW), _vector(decay.at[1], PER_COLUMN)
        share = jnp.exp2(_over_columns(passed) - _over_rows(less))
        row = plgpu.broadcasted_iota(jnp.int32, _SQUARE, 0, layout=WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, _SQUARE, 1, layout=WGMMA)
        weights = self.result(met, len(blocks)) * share
        return jnp.where(row >= column, weights, 0.0).astype(self.geometry.dtype)

    def multiply(
        self,
        total: Ref,
        left: Any,  # noqa: ANN401 - a ref or an array
        right: Ref,
        *,
        left_transposed: bool = False,
        right_transposed: bool = False,
    ) -> None:
        """Starts adding a product to a square."""
        if not self.kernel.interpret:
            left = left.transpose((1, 0)) if left_transposed else left
            plgpu.wgmma(total, left, right.transpose((1, 0)) if right_transposed else right)
            return
        left, right = left[...].astype(jnp.float32), right[...].astype(jnp.float32)
        left = left.T if left_transposed else left
        total[...] += lax.dot(left, right.T if right_transposed else right)

    def result(self, total: Ref, in_flight: int | None) -> Array:
        """Returns a square once at most so many products that were started later still run."""
        if self.kernel.interpret:
            return total[...]
        return plgpu.wgmma_accumulator_load(total, wait_n=in_flight)

    def zeros(self) -> Array:
        """Returns a square of zeros."""
        return plgpu.layout_cast(jnp.zeros(_SQUARE, jnp.float32), WGMMA)

    def skip(self) -> Array:
        """Returns what the head adds of its input to its output."""
        return self.refs["d"][self.head].astype(jnp.float32)

    def places(self, state: Array) -> list[Ref]:
        """Returns where the squares of a state are in the pool."""
        rows = pl.ds(self.column - self.head * self.geometry.sizes.head_dim, SIDE)
        pool = self.refs["states"]
        return [
            pool.at[state, self.head, rows, pl.ds(block * SIDE, SIDE)]
            for block in range(self.geometry.blocks)
        ]

    def exists(self, state: Array) -> Array:
        """Whether this is a state of the pool."""
        return (state >= 0) & (state < self.refs["states"].shape[0])

    def begun(self) -> list[Array]:
        """Returns the state that the row starts from."""
        read = self.task.row.read
        known = self.exists(read)
        squares = self.places(jnp.where(known, read, 0))
        loaded = [plgpu.load(square, layout=WGMMA, optimized=False) for square in squares]
        return [jnp.where(known, part.astype(jnp.float32), 0.0) for part in loaded]

    def publish(self, state: Sequence[Array]) -> None:
        """Puts the state where the next piece multiplies it."""
        for block, part in enumerate(state):
            self.refs["state"].at[self.number, block][...] = part.astype(self.geometry.dtype)
        plgpu.commit_smem()

    def keep(self, number: Array, state: Sequence[Array]) -> None:
        """Writes the state if it is to be kept as it is after this piece."""
        if "kept" in self.refs:
            self.write_state(self.refs["kept"][self.task.first_piece + number], state)

    def write_state(self, place: Array, state: Sequence[Array]) -> None:
        """Writes a state of the pool, if it is one."""

        @pl.when(self.exists(place))
        def _() -> None:
            for ref, part in zip(self.places(place), state, strict=True):
                ref[...] = part.astype(self.geometry.state_dtype)

    def store(self, out: Array, start: Array, length: Array) -> None:
        """Stores outputs: all at once, or token by token where other rows' are behind them."""
        refs, columns = self.refs, pl.ds(self.column, SIDE)
        # The copy of the piece before reads from the same place.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(length == SIDE)
        def _() -> None:
            refs["y"].at[self.number][...] = out
            plgpu.commit_smem()
            target = refs["out"].at[pl.ds(start, SIDE), columns]
            plgpu.copy_smem_to_gmem(refs["y_copied"].at[self.number], target)

        @pl.when(length < SIDE)
        def _() -> None:
            refs["y_rows"].at[self.number][...] = out
            plgpu.commit_smem()

            @pl.loop(0, length)
            def _(token: Array) -> None:
                source = refs["y_rows"].at[self.number, pl.ds(token, 1)]
                target = refs["out"].at[pl.ds(start + token, 1), columns]
                plgpu.copy_smem_to_gmem(source, target)

    def write_zeros(self) -> None:
        """Gives zeros to the tokens of no row."""
        row = self.task.row

        @pl.loop(0, lax.div(row.stop - row.start + (SIDE - 1), jnp.int32(SIDE)))
        def _(number: Array) -> None:
            start = row.start + number * SIDE
            zeros = self.zeros().astype(self.geometry.dtype)
            self.store(zeros, start, jnp.minimum(row.stop - start, SIDE))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _vector(ref: Ref, layout: Any) -> Array:  # noqa: ANN401 - private to JAX
    """Loads a number for each row or column."""
    return plgpu.load(ref, layout=layout, optimized=False)


def _load(square: Ref) -> Array:
    return plgpu.load(square, layout=WGMMA).astype(jnp.float32)


def _over_columns(vector: Array) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, _SQUARE, [0]), WGMMA)


def _over_rows(vector: Array) -> Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, _SQUARE, [1]), WGMMA)
