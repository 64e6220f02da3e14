"""The Mosaic GPU kernel that chooses the largest scores: a block bisects one token's, and writes slots in order.

A row of scores is read three times: to list what may be chosen, to count how much of it each warp has, and to write.
For the last two each warp has a sixteenth of the row, so that what precedes it needs no search.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int

from pallas_kernels.mosaic_bisection import (
    ALL_WARPS,
    HIGHEST,
    LOWEST,
    PIECE,
    WARPGROUPS,
    Bisection,
    Bracket,
    Listed,
    scratch,
)
from pallas_kernels.mosaic_rows import INTERPRETED, row_pieces
from pallas_kernels.mosaic_warps import (
    WARPS,
    gather,
    place_chosen,
    store_warp_sums,
    sums_before,
)
from pallas_kernels.ordered_floats import ordered

Ref = Any

CHUNK = 8192
"""Scores are a multiple of this: `STEP` for each warpgroup, and as much for each warp's share of a row."""

STEP = 2048

_COLUMNS = 128
_TOGETHER = CHUNK // ALL_WARPS // _COLUMNS
_SAMPLES = 4
# The first list is to hold somewhat more scores than are chosen.
_MARGIN = 1.3
_LARGEST = float(np.finfo(np.float32).max)


@partial(jax.jit, static_argnames=("topk", "page_size", "num_slots", "interpret"))
def select(
    scores: Float32[Array, "tokens keys"],
    seen: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    page_table: Int[Array, "rows table_width"],
    *,
    topk: int,
    page_size: int,
    num_slots: int,
    interpret: bool = False,
) -> Int[Array, "tokens topk"]:
    """Returns the slots of the `topk` largest of each token's first `seen` scores, as `api.index_topk` orders them.

    Args:
        scores: a multiple of `CHUNK` per token, none of the first `seen` NaN; the others may be anything.
        seen: keys that each token sees.
        rows: of the page table, one per token.
        page_table: ids of pages.
        topk: how many are chosen.
        page_size: tokens per page, a power of two.
        num_slots: what unused places hold.
        interpret: run on the CPU, slowly.
    """
    tokens, keys = scores.shape
    room = -(-topk // PIECE) * PIECE
    shared = scratch() | {"places": plgpu.SMEM((room,), jnp.int32)}
    options = {"topk": topk, "page_size": page_size, "num_slots": num_slots}

    def body(*refs: Ref) -> None:
        names = ("scores", "by_warp", "seen", "rows", "page_table", "slots", *shared)
        _Block(dict(zip(names, refs, strict=True)), **options, interpret=interpret).run()

    slots = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, room), jnp.int32),
        grid=(tokens,),
        grid_names=("token",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=tuple(shared.values()),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=INTERPRETED if interpret else None,
        kernel_name="index_topk",
    )(scores, scores.reshape(tokens, ALL_WARPS, keys // ALL_WARPS), seen, rows, page_table)
    return slots[:, :topk]


class _Block(Bisection):
    """One block at work on its token."""

    has_weights = False

    def __init__(
        self,
        refs: Mapping[str, Ref],
        *,
        topk: int,
        page_size: int,
        num_slots: int,
        interpret: bool,
    ) -> None:
        super().__init__(refs, interpret=interpret)
        self.topk, self.page_size, self.num_slots = topk, page_size, num_slots
        self.token = lax.axis_index("token")
        self.seen = refs["seen"][self.token]
        self.place = plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=self.flat)

    def run(self) -> None:
        """Writes the token's slots; where all keys are chosen they need no search."""
        is_all = self.seen <= self.topk
        pl.when(jnp.logical_not(is_all))(self.choose)
        for start in range(0, self.refs["slots"].shape[1], PIECE * WARPGROUPS):
            self.write(start + self.warpgroup * PIECE, is_all)

    def write(self, start: Array, is_all: Array) -> None:
        """Turns a piece of the places into slots."""
        out = self.refs["slots"]

        @pl.when(start < out.shape[1])
        def _() -> None:
            piece = pl.ds(start, PIECE)
            chosen = plgpu.load(self.refs["places"].at[piece], layout=self.flat, optimized=False)
            count = start + self.place
            is_real = count < jnp.minimum(self.seen, self.topk)
            # Unused places must not lead outside of the page table.
            position = jnp.where(is_real, jnp.where(is_all, count, chosen), 0)
            bits = self.page_size.bit_length() - 1
            page = lax.shift_right_logical(position, jnp.full_like(position, bits))
            row = self.refs["rows"][self.token]
            page = gather(
                self.refs["page_table"], row, page, layout=self.flat, interpret=self.interpret
            )
            slot = page * self.page_size + (position & (self.page_size - 1))
            out[self.token, piece] = jnp.where(is_real, slot, self.num_slots)

    def choose(self) -> None:
        """Finds the smallest score that is chosen, and writes the positions of all that are."""
        guess = self.guess()
        met = self.list_from(guess, jnp.float32(HIGHEST))
        holds = met.above >= self.topk
        guess, none = ordered(guess), jnp.int32(0)
        nothing = jnp.float32(0)
        bracket = Bracket(
            jnp.where(holds, guess, ordered(jnp.float32(LOWEST))),
            jnp.where(holds, ordered(jnp.float32(HIGHEST)), guess),
            jnp.where(holds, met.above, self.seen),
            jnp.where(holds, none, met.above),
            nothing,
        )
        bound, bracket = self.settle(
            bracket,
            lambda count, _: count >= self.topk,
            jnp.float32(LOWEST),
            Listed(none, nothing),
            holds & met.fits,
        )
        # No score lies between the bound and the bracket's other end.
        self.write_places(bound, self.topk - bracket.over)

    def write_places(self, bound: Array, ties: Array) -> None:
        """Writes positions of scores above the bound and of the first `ties` that equal it, in order."""
        if self.interpret:
            self.write_places_plainly(bound, ties)
            self.meet()
            return
        (piece,) = row_pieces(WARPS, _COLUMNS, 4)
        layout = piece.layout
        columns = self.refs["by_warp"].shape[2]
        warp = self.warpgroup * WARPS + plgpu.broadcasted_iota(
            jnp.int32, (WARPS, _COLUMNS), 0, layout=layout
        )
        place = warp * columns + plgpu.broadcasted_iota(
            jnp.int32, (WARPS, _COLUMNS), 1, layout=layout
        )
        # Warps of a warpgroup go together as far as its first one must.
        first = self.warpgroup * WARPS * columns
        needed = jnp.clip(self.seen - first, 0, columns)
        turns = lax.div(needed + _COLUMNS * _TOGETHER - 1, _COLUMNS * _TOGETHER)

        def load(turn: Array) -> list[tuple[Array, Array]]:
            loaded = []
            for part in range(_TOGETHER):
                column = (turn * _TOGETHER + part) * _COLUMNS
                rows, span = pl.ds(self.warpgroup * WARPS, WARPS), pl.ds(column, _COLUMNS)
                source = self.refs["by_warp"].at[self.token, rows, span]
                x = plgpu.load(source, layout=layout, optimized=False)
                loaded.append((x, place + column))
            return [
                (jnp.where(position < self.seen, _bounded(x), np.float32(np.nan)), position)
                for x, position in loaded
            ]

        def count(turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            above, equal = state
            for x, _ in load(turn):
                above += (x > bound).astype(jnp.int32)
                equal += (x == bound).astype(jnp.int32)
            return above, equal

        zero = plgpu.layout_cast(jnp.zeros((WARPS, _COLUMNS), jnp.int32), layout)
        counts = lax.fori_loop(jnp.int32(0), turns, count, (zero, zero))
        row = self.warpgroup * WARPS
        for column, array in enumerate(counts):
            store_warp_sums(self.refs["ints"], row, column, array, layout=layout, interpret=False)
        self.meet()
        before = tuple(
            sums_before(self.refs["ints"], row, column, zero.shape, layout=layout)
            for column in (0, 1)
        )

        def write(turn: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
            places = self.refs["places"]
            for x, position in load(turn):
                before = place_chosen(places, x, position, bound, ties, before, layout=layout)
            return before

        lax.fori_loop(jnp.int32(0), turns, write, before)
        self.meet()

    def write_places_plainly(self, bound: Array, ties: Array) -> None:
        """Does the same for the interpreter, by the first warpgroup alone."""

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            x = _bounded(self.refs["scores"][self.token, :])
            position = jnp.arange(len(x), dtype=jnp.int32)
            is_equal = (x == bound) & (position < self.seen)
            is_early = is_equal & (jnp.cumsum(is_equal, dtype=jnp.int32) <= ties)
            chosen = ((x > bound) & (position < self.seen)) | is_early
            places = self.refs["places"]
            at = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, places.shape[0])
            written = jnp.zeros(places.shape, jnp.int32).at[at].set(position, mode="drop")
            places[...] = written

    def guess(self) -> Array:
        """Returns a score that somewhat more than `topk` reach, judging by some of them."""
        last = jnp.maximum(self.seen - PIECE, 0)
        samples, count = [], self.zeros(jnp.int32)
        for sample in range(_SAMPLES):
            turn = self.warpgroup * _SAMPLES + sample
            start = lax.div(turn * lax.div(last, 4), WARPGROUPS * _SAMPLES - 1) * 4
            is_seen = self.place + start < self.seen
            samples.append(jnp.where(is_seen, self.load(start), LOWEST))
            count += is_seen.astype(jnp.int32)
        self.store("ints", 0, count)
        self.meet()
        share = self.gather("ints", 0).astype(jnp.float32) / self.seen.astype(jnp.float32)
        self.meet()
        return self.reached_by(samples, _MARGIN * self.topk * share)

    def weights(self, x: Array) -> Array:
        """Nobody asks for weights."""
        return jnp.zeros_like(x)

    def visit_row(self, visit: Callable[[Array, Any], Any], state: Any) -> Any:  # noqa: ANN401 - a pytree
        """Folds over every fourth chunk of what the token sees."""
        chunks = lax.div(self.seen + STEP - 1, STEP)
        turns = lax.div(chunks - self.warpgroup + WARPGROUPS - 1, WARPGROUPS)

        def fetch(index: Array) -> list[Array]:
            first = (self.warpgroup + index * WARPGROUPS) * STEP
            return [self.load(first + start) for start in range(0, STEP, PIECE)]

        def turn(index: Array, carried: tuple[list[Array], Any]) -> tuple[list[Array], Any]:
            loaded, state = carried
            # The next scores are on their way while these are looked at; behind the last ones they are the last ones.
            after = fetch(jnp.minimum(index + 1, jnp.maximum(turns - 1, 0)))
            first = (self.warpgroup + index * WARPGROUPS) * STEP
            for piece, x in enumerate(loaded):
                is_seen = self.place + (first + piece * PIECE) < self.seen
                state = visit(jnp.where(is_seen, x, LOWEST), state)
            return after, state

        _, state = lax.fori_loop(jnp.int32(0), turns, turn, (fetch(jnp.int32(0)), state))
        return state

    def load(self, start: Array) -> Array:
        """Sends for a piece of the row."""
        source = self.refs["scores"].at[self.token, pl.ds(start, PIECE)]
        return _bounded(plgpu.load(source, layout=self.flat, optimized=False))


def _bounded(x: Array) -> Array:
    """Infinite scores count as the largest number."""
    return jnp.minimum(x, _LARGEST)
