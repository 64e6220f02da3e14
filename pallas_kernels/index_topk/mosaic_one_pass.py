"""Selection of the largest scores in one pass over a row: candidates go into lists with their positions.

The lists are then searched for the bound, and marks restore the order of positions. If the first guess was wrong or a
list overflowed, the block runs the slower path (mosaic/bisection.py, mosaic_places.py) instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.index_topk.mosaic_bounds import Bounds
from pallas_kernels.index_topk.mosaic_marks import (
    append_placed,
    count_marks,
    mark,
    place_marked,
)
from pallas_kernels.index_topk.mosaic_reductions import reduction_of_warps, store_reductions
from pallas_kernels.mosaic.bisection import HIGHEST, LOWEST, midpoint
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.ordered_floats import from_ordered, ordered
from pallas_kernels.mosaic.private_types import Layout
from pallas_kernels.mosaic.row_blocks import fold_ahead
from pallas_kernels.mosaic.rows import row_pieces
from pallas_kernels.mosaic.teams import LARGE, PIECE, Team
from pallas_kernels.mosaic.warps import WARPS

MOST_KEYS = 2**17
"""Most keys of a row: capacity of the marks."""

MOST_CHOSEN = LARGE.listed // 2
"""Largest topk; shared memory has no room for longer lists next to the marks."""

SAMPLES = 16
"""Pieces of a row in the sample for the guess."""

_WORDS, _TOGETHER = 128, 4
# (Wanted length of the lists as a multiple of topk, tolerated excess over it), for lists of at least 4 * topk entries
# and for shorter lists.
_LOOSE, _TIGHT = (1.3, 1.4), (1.25, 1.15)
# Rows of the table of reductions: rows 0 and 1 alternate between search steps, the others have one use each.
_ABOVE, _LARGEST, _MARKED, _ROWS = 2, 3, 4, 5


def supports(keys: int, topk: int) -> bool:
    """Returns whether the one-pass selection supports rows of `keys` keys and this topk."""
    return keys <= MOST_KEYS and topk <= MOST_CHOSEN


def shared_bytes(keys: int, team: Team) -> int:
    """Returns the bytes of shared memory of both lists and the marks."""
    return 8 * team.listed + keys


def scratch_of_one_pass(keys: int, team: Team) -> dict[str, Any]:
    """Returns the shared memory of the one-pass selection, in addition to the team's `scratch`."""
    return {
        "where": plgpu.SMEM((team.listed,), jnp.int32),
        "reductions": plgpu.SMEM((_ROWS, team.warps), jnp.int32),
        "marks": plgpu.SMEM((team.warps, keys // team.warps // 4), jnp.int32),
    }


class OnePass:
    """One block's one-pass selection in its row."""

    def __init__(self, block: Any) -> None:  # noqa: ANN401 - its own kernel's block
        self.block, self.refs = block, block.refs
        self.interpret, self.warpgroup, self.flat = block.interpret, block.warpgroup, block.flat
        self.warpgroups, self.room = block.team.warpgroups, block.team.room
        (piece,) = row_pieces(WARPS, _WORDS, 4)
        self.by_row = piece.layout

    def choose(self, otherwise: Callable[[Array, Array], None]) -> None:
        """Writes the selected positions in order; if a list overflowed, calls `otherwise(guess, count)` instead."""
        guess = self.guess()
        self.clear()
        above, longest = self.list_from(guess)
        is_listed = (above >= self.block.topk) & (guess > LOWEST)
        is_listed &= longest <= (self.room * WARPS if self.interpret else self.room)
        pl.when(is_listed)(partial(self.finish, guess, above))
        pl.when(jnp.logical_not(is_listed))(partial(otherwise, guess, above))

    def start_of(self, turn: Array | int) -> Array:
        """Returns the start of the warpgroup's `turn`-th piece."""
        return (turn * self.warpgroups + self.warpgroup) * PIECE

    def fetch(self, start: Array) -> Array:
        """Loads a piece; keys that the token does not see become NaN."""
        is_seen = self.block.place + start < self.block.seen
        return jnp.where(is_seen, self.block.load(start), np.float32(np.nan))

    def guess(self) -> Array:
        """Returns a bound that somewhat more than `topk` scores reach, estimated from a sample."""
        seen, samples = self.block.seen, []
        last = jnp.maximum(seen - PIECE, 0)
        own = SAMPLES // self.warpgroups
        for sample in range(own):
            turn = self.warpgroup * own + sample
            start = lax.div(turn * lax.div(last, 4), SAMPLES - 1) * 4
            samples.append(self.fetch(start))
        count = SAMPLES * jnp.minimum(seen, PIECE)
        share = count.astype(jnp.float32) / seen.astype(jnp.float32)
        margin, enough = _LOOSE if self.block.team.listed >= 4 * self.block.topk else _TIGHT
        wanted = margin * self.block.topk * share

        def is_open(bounds: Bounds) -> Array:
            is_wide = bounds.high - bounds.low != 1
            return is_wide & (bounds.above.astype(jnp.float32) > enough * wanted)

        low, high = ordered(jnp.float32(LOWEST)), ordered(jnp.float32(HIGHEST))
        start = Bounds(low, high, count, jnp.int32(0))
        found = self.search(samples, start, wanted, is_open, is_even=False)
        return from_ordered(found.low)

    def search(
        self,
        pieces: list[Array],
        bounds: Bounds,
        wanted: Array,
        is_open: Callable[[Bounds], Array],
        *,
        is_even: bool,
    ) -> Bounds:
        """Narrows the bracket by counting the values that reach a bound, two steps per iteration.

        With `is_even` every second step uses interpolation, the others bisection.
        """

        def turn(bounds: Bounds) -> Bounds:
            for half in range(2):
                interpolates = is_even and half == 0
                middle = (
                    bounds.interpolated(wanted)
                    if interpolates
                    else midpoint(bounds.low, bounds.high)
                )
                bound, count = from_ordered(middle), self.block.flat_zeros(jnp.int32)
                for x in pieces:
                    count += (x >= bound).astype(jnp.int32)
                bounds = bounds.narrowed(middle, self.reduce(half, count, "sum"), wanted)
            return bounds

        return lax.while_loop(is_open, turn, bounds)

    def reduce(self, row: int, array: Array, kind: str) -> Array:
        """Returns the sum or maximum over the block; two successive calls must use different rows of the table."""
        self.store_reductions(row, array, kind)
        self.block.sync()
        return reduction_of_warps(self.refs["reductions"], row, kind=kind, interpret=self.interpret)

    def store_reductions(self, row: int, array: Array, kind: str, layout: Layout = None) -> None:
        """Stores each warp's reduction; other warps may read it after the block barrier."""
        store_reductions(
            self.refs["reductions"],
            row,
            self.warpgroup * WARPS,
            array,
            kind=kind,
            layout=self.flat if layout is None else layout,
            interpret=self.interpret,
        )

    def clear(self) -> None:
        """Clears the warpgroup's lists and its share of the marks."""
        room = WARPS * self.room
        first = self.warpgroup * room
        for start in range(0, room, PIECE):
            empty = jnp.full((PIECE,), LOWEST, jnp.float32)
            assign(
                self.refs["found"], pl.ds(first + start, PIECE), plgpu.layout_cast(empty, self.flat)
            )
        rows = pl.ds(self.warpgroup * WARPS, WARPS)
        nothing = plgpu.layout_cast(jnp.zeros((WARPS, _WORDS), jnp.int32), self.by_row)
        for column in range(0, self.refs["marks"].shape[1], _WORDS):
            assign(self.refs["marks"], (rows, pl.ds(column, _WORDS)), nothing)
        self.block.sync()

    def list_from(self, low: Array) -> tuple[Array, Array]:
        """Fills the lists with the scores >= `low`; returns their number and the length of the longest list."""

        def visit(x: Array, start: Array, lengths: Array) -> Array:
            return append_placed(
                (self.refs["found"], self.refs["where"]),
                self.warpgroup * (WARPS * self.room),
                lengths,
                x,
                self.block.place + start,
                low,
                room=self.room,
                layout=self.flat,
                interpret=self.interpret,
            )

        lengths = self.stream(visit, self.block.flat_zeros(jnp.int32))
        self.store_reductions(_ABOVE, lengths, "same")
        self.block.sync()
        find = partial(
            reduction_of_warps, self.refs["reductions"], _ABOVE, interpret=self.interpret
        )
        return find(kind="sum"), find(kind="max")

    def stream(self, visit: Callable[[Array, Array, Array], Array], lengths: Array) -> Array:
        """Folds over the warpgroup's share of the visible scores, with the next pieces' loads in flight."""
        pieces = lax.div(self.block.seen + PIECE - 1, PIECE)
        turns = lax.div(pieces + _TOGETHER * self.warpgroups - 1, _TOGETHER * self.warpgroups)

        def fetch(turn: Array) -> list[Array]:
            return [
                self.block.load(self.start_of(turn * _TOGETHER + part)) for part in range(_TOGETHER)
            ]

        def look(turn: Array, loaded: list[Array], lengths: Array) -> Array:
            for part, x in enumerate(loaded):
                start = self.start_of(turn * _TOGETHER + part)
                is_seen = self.block.place + start < self.block.seen
                lengths = visit(jnp.where(is_seen, x, np.float32(np.nan)), start, lengths)
            return lengths

        return fold_ahead(turns, fetch, look, lengths)

    def finish(self, guess: Array, above: Array) -> None:
        """Searches the lists for the exact bound, and writes the selected positions in order."""
        listed = self.block.load_list()
        largest = listed[0]
        for x in listed[1:]:
            largest = jnp.maximum(largest, x)
        high = self.reduce(_LARGEST, ordered(largest), "max") + 1
        topk = self.block.topk
        found = self.search(
            listed,
            Bounds(ordered(guess), high, above, jnp.int32(0)),
            jnp.float32(topk),
            lambda bounds: (bounds.high - bounds.low != 1) & (bounds.above != topk),
            is_even=True,
        )
        low, high = from_ordered(found.low), from_ordered(found.high)
        write = self.write_plainly if self.interpret else self.write
        write(listed, low, high, topk - found.over)
        self.block.sync()

    def write(self, listed: list[Array], low: Array, high: Array, ties: Array) -> None:
        """Marks the selected positions, counts the marks before each warp's share, and writes the positions."""
        self.mark(listed, low, high)
        row, width = self.warpgroup * WARPS, self.refs["marks"].shape[1]
        # All warps of a warpgroup loop as far as its first one needs to.
        needed = jnp.clip(self.block.seen - row * width * 4, 0, width * 4)
        turns = lax.div(needed + 4 * _WORDS - 1, 4 * _WORDS)
        before = self.marks_before(row, turns)
        iota = partial(plgpu.broadcasted_iota, jnp.int32, (WARPS, _WORDS), layout=self.by_row)
        place = ((row + iota(0)) * width + iota(1)) * 4

        def place_them(turn: Array, before: Array) -> Array:
            position = place + turn * (4 * _WORDS)
            words = self.load_marks(row, turn)
            return place_marked(
                self.refs["places"], words, position, ties, before, layout=self.by_row
            )

        lax.fori_loop(jnp.int32(0), turns, place_them, before)

    def marks_before(self, row: Array, turns: Array) -> Array:
        """Returns for each warp the number of marks before its row; a row is read in `turns` iterations."""

        def count(turn: Array, total: Array) -> Array:
            return total + count_marks(self.load_marks(row, turn), layout=self.by_row)

        zero = plgpu.layout_cast(jnp.zeros((WARPS, _WORDS), jnp.int32), self.by_row)
        total = lax.fori_loop(jnp.int32(0), turns, count, zero)
        self.store_reductions(_MARKED, total, "sum", self.by_row)
        self.block.sync()
        reductions = self.refs["reductions"]
        return zero + reduction_of_warps(
            reductions, _MARKED, kind="sum", interpret=False, before=row
        )

    def load_marks(self, row: Array, turn: Array) -> Array:
        """Loads one iteration's marks of the warpgroup's rows, four in a word."""
        part = self.refs["marks"].at[pl.ds(row, WARPS), pl.ds(turn * _WORDS, _WORDS)]
        return plgpu.load(part, layout=self.by_row, optimized=False)

    def mark(self, listed: list[Array], low: Array, high: Array) -> None:
        """Marks the positions of the listed scores: 1 for scores >= `high`, 16 for ties."""
        first = self.warpgroup * (WARPS * self.room)
        for part, x in enumerate(listed):
            own = self.refs["where"].at[pl.ds(first + part * PIECE, PIECE)]
            positions = plgpu.load(own, layout=self.flat, optimized=False)
            mark(self.refs["marks"], x, positions, low, high, layout=self.flat)
        self.block.sync()

    def write_plainly(self, listed: list[Array], low: Array, high: Array, ties: Array) -> None:
        """Does the same as `write`, for the interpreter, in the first warpgroup only."""
        del listed

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            x, where = self.refs["found"][...], self.refs["where"][...]
            is_tie = (x >= low) & (x < high)
            last = jnp.sort(jnp.where(is_tie, where, MOST_KEYS))[jnp.maximum(ties - 1, 0)]
            chosen = (x >= high) | (is_tie & (where <= last) & (ties > 0))
            places = self.refs["places"]
            assign(places, ..., jnp.sort(jnp.where(chosen, where, MOST_KEYS))[: places.shape[0]])
