"""Selection within a row of numbers by bisection, without sorting: the bound of the k largest, or of a sum of weights.

Cuts are found by bisecting integers that order as floats do (`ordered_floats.py`). Each step counts the numbers that
are no less than a bound, or sums the weight below it. A step over a whole row takes microseconds, so one pass first
lists the numbers above a guessed bound in shared memory, and later steps read the list. The row is read again only if
the guess was too high, or so low that the list overflowed, until few enough numbers are left between the bounds.

All threads of a block hold the same scalars and take the same branches. The order of every sum depends on shapes alone.
Numbers must not be NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.mosaic.lists import append
from pallas_kernels.mosaic.ordered_floats import from_ordered, ordered
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import flat_pieces
from pallas_kernels.mosaic.teams import PIECE, Team
from pallas_kernels.mosaic.warps import WARPS, meet_all, store_warp_sums, sum_of_warps

_ENOUGH = 1.2
"""How many more samples than wanted may reach a guess."""

LOWEST = np.float32(-np.inf)
HIGHEST = np.float32(np.inf)


def midpoint(low: Array, high: Array) -> Array:
    """Returns the mean of two integers, without overflow."""
    return (low & high) + lax.shift_right_arithmetic(low ^ high, 1)


class Bracket(NamedTuple):
    """Where the largest bound that holds lies.

    Attributes:
        low: integer of a bound that holds.
        high: integer of a larger one that does not.
        above: how many numbers are no less than `low`.
        over: how many are no less than `high`.
        below: weight of those between the floor and `low`.
    """

    low: Array
    high: Array
    above: Array
    over: Array
    below: Array

    @property
    def is_settled(self) -> Array:
        """Whether one number is left, or one value of several numbers."""
        return self.is_one_value | (self.above - self.over == 1)

    @property
    def is_one_value(self) -> Array:
        """Whether no number lies between the bounds."""
        return self.high - self.low == 1

    @property
    def middle(self) -> Array:
        """The integer in the middle."""
        return midpoint(self.low, self.high)

    def narrowed(self, middle: Array, holds: Array, count: Array, mass: Array) -> "Bracket":
        """What is left when the bound in the middle holds or not."""
        return Bracket(
            jnp.where(holds, middle, self.low),
            jnp.where(holds, self.high, middle),
            jnp.where(holds, count, self.above),
            jnp.where(holds, self.over, count),
            jnp.where(holds, mass, self.below),
        )


class Listed(NamedTuple):
    """What is known of the numbers that are not in the list.

    Attributes:
        over: how many lie above it.
        below: weight of those below it.
    """

    over: Array
    below: Array


class Pass(NamedTuple):
    """What one pass over the row has found.

    Attributes:
        above: how many numbers are no less than the bound.
        below: weight of those that are less.
        total: weight of all.
        fits: whether the list holds all that it was to hold.
    """

    above: Array
    below: Array
    total: Array
    fits: Array


class Bisection(ABC):
    """One block at work on its row.

    Attributes:
        refs: what the kernel was given, and the team's `scratch`.
        team: the block's warpgroups.
        shape: of the arrays that `visit_row` hands out, 4 numbers per thread.
        layout: of these.
        has_weights: whether weights are asked for; without them they are 0.
    """

    shape: tuple[int, ...] = (PIECE,)
    has_weights: bool = True

    def __init__(self, refs: Mapping[str, Ref], *, team: Team, interpret: bool) -> None:
        self.refs, self.team, self.interpret = refs, team, interpret
        self.warpgroup = lax.axis_index("warpgroup")
        self.flat: Any = flat_pieces(PIECE, 4)[0].layout
        self.layout: Any = self.flat

    @abstractmethod
    def visit_row(self, visit: Callable[[Array, Any], Any], state: Any) -> Any:  # noqa: ANN401 - a pytree
        """Folds over the warpgroup's share of the row; places without a number hold -inf."""

    @abstractmethod
    def weights(self, x: Array) -> Array:
        """Returns the numbers' weights, 0 for -inf."""

    def settle(
        self,
        bracket: Bracket,
        holds: Callable[[Array, Array], Array],
        floor: Array,
        listed: Listed,
        is_listed: Array,
    ) -> tuple[Array, Bracket]:
        """Returns the largest bound that holds, which is one of the numbers, and the bracket that holds no other.

        Args:
            bracket: where it lies.
            holds: whether a bound with that count from it on, and that weight below it, holds.
            floor: weights of numbers below it do not count.
            listed: what is known of the numbers that are not in the list.
            is_listed: whether all numbers in the bracket are in the list.
        """

        def narrow(ask: Callable[[Array], tuple[Array, Array]], bracket: Bracket) -> Bracket:
            middle = bracket.middle
            count, mass = ask(from_ordered(middle))
            return bracket.narrowed(middle, holds(count, mass), count, mass)

        def in_row(bound: Array) -> tuple[Array, Array]:
            return self.ask_row(bound, floor)

        def is_unlisted(state: tuple) -> Array:
            return jnp.logical_not(state[3])

        def list_it(state: tuple) -> tuple:
            bracket, _, few, _ = state
            bracket = lax.while_loop(
                lambda now: jnp.logical_not(now.is_settled) & (now.above - now.over > few),
                lambda now: narrow(in_row, now),
                bracket,
            )
            # A number that many numbers share needs no list.
            found = self.list_from(from_ordered(bracket.low), from_ordered(bracket.high))
            return (
                bracket,
                Listed(bracket.over, bracket.below),
                few // 16,
                found.fits | bracket.is_one_value,
            )

        # So many are listed without fear that one warp has most of them.
        few = jnp.int32(self.team.listed // 2)
        state = (bracket, listed, few, is_listed)
        bracket, listed, _, _ = lax.while_loop(is_unlisted, list_it, state)

        def in_list(bound: Array) -> tuple[Array, Array]:
            count, mass = self.ask_list(bound, floor)
            return listed.over + count, listed.below + mass

        bracket = lax.while_loop(
            lambda now: jnp.logical_not(now.is_settled), lambda now: narrow(in_list, now), bracket
        )
        bound = lax.cond(
            bracket.is_one_value,
            lambda: from_ordered(bracket.low),
            lambda: self.only(from_ordered(bracket.low), from_ordered(bracket.high)),
        )
        return bound, bracket

    def list_from(self, low: Array, high: Array) -> Pass:
        """Lists the numbers in [low, high), and counts and weighs all by `low`."""
        room = WARPS * self.team.room
        first = self.warpgroup * room
        for start in range(0, room, PIECE):
            empty = jnp.full((PIECE,), LOWEST, jnp.float32)
            place = pl.ds(first + start, PIECE)
            self.refs["found"][place] = plgpu.layout_cast(empty, self.flat)
        self.meet()

        def visit(x: Array, state: tuple) -> tuple:
            lengths, above, below, total = state
            lengths = append(
                self.refs["found"],
                first,
                lengths,
                x,
                low,
                high,
                room=self.team.room,
                layout=self.layout,
                interpret=self.interpret,
            )
            is_above = x >= low
            above += is_above.astype(jnp.int32)
            if self.has_weights:
                weights = self.weights(x)
                below += jnp.where(is_above, 0.0, weights)
                total += weights
            return lengths, above, below, total

        counts, sums = self.zeros(jnp.int32), self.zeros(jnp.float32)
        lengths, above, below, total = self.visit_row(visit, (counts, counts, sums, sums))
        self.store("ints", 0, above)
        self.store("ints", 1, lengths)
        self.store("floats", 0, below)
        self.store("floats", 1, total)
        self.meet()
        longest = self.refs["ints"][0, 1]
        for warp in range(1, self.team.warps):
            longest = jnp.maximum(longest, self.refs["ints"][warp, 1])
        # Each place of a warp's share of the array says how long its list is; the interpreter has one warp for four.
        most = PIECE * room if self.interpret else PIECE // WARPS * self.team.room
        columns = (("ints", 0), ("floats", 0), ("floats", 1))
        above, below, total = (self.gather(*column) for column in columns)
        found = Pass(above, below, total, longest <= most)
        self.meet()
        return found

    def ask_row(self, bound: Array, floor: Array) -> tuple[Array, Array]:
        """Returns how many of the row's numbers are no less than a bound, and the weight from the floor up to it."""

        def visit(x: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            return self.asked(x, state, bound, floor)

        state = (self.zeros(jnp.int32), self.zeros(jnp.float32))
        return self.summed(self.visit_row(visit, state), self.layout)

    def ask_list(self, bound: Array, floor: Array) -> tuple[Array, Array]:
        """Asks the list the same."""
        state = (self.flat_zeros(jnp.int32), self.flat_zeros(jnp.float32))
        for x in self.load_list():
            state = self.asked(x, state, bound, floor)
        return self.summed(state, self.flat)

    def asked(
        self, x: Array, state: tuple[Array, Array], bound: Array, floor: Array
    ) -> tuple[Array, Array]:
        """Adds some numbers to an answer."""
        count, mass = state
        is_above = x >= bound
        if self.has_weights:
            weighs = jnp.logical_not(is_above) & (x >= floor)
            mass += jnp.where(weighs, self.weights(x), 0.0)
        return count + is_above.astype(jnp.int32), mass

    def summed(
        self,
        state: tuple[Array, Array],
        layout: Layout,
    ) -> tuple[Array, Array]:
        """Returns the sums of an answer over all threads of the block."""
        count, mass = state
        self.store("ints", 0, count, layout)
        if self.has_weights:
            self.store("floats", 0, mass, layout)
        self.meet()
        weight = self.gather("floats", 0) if self.has_weights else jnp.float32(0)
        found = self.gather("ints", 0), weight
        self.meet()
        return found

    def only(self, low: Array, high: Array) -> Array:
        """Returns the only number of the list in [low, high)."""
        total = self.flat_zeros(jnp.float32)
        for x in self.load_list():
            total += jnp.where((x >= low) & (x < high), x, 0.0)
        self.store("floats", 0, total, self.flat)
        self.meet()
        found = self.gather("floats", 0)
        self.meet()
        return found

    def load_list(self) -> list[Array]:
        """Returns the warpgroup's part of the list; places without a number hold -inf."""
        room = WARPS * self.team.room
        first = self.warpgroup * room
        parts = [pl.ds(first + start, PIECE) for start in range(0, room, PIECE)]
        return [
            plgpu.load(self.refs["found"].at[part], layout=self.flat, optimized=False)
            for part in parts
        ]

    def store(self, table: str, column: int, array: Array, layout: Layout = None) -> None:
        """Shows each warp's sum to the other threads, once they have met."""
        store_warp_sums(
            self.refs[table],
            self.warpgroup * WARPS,
            column,
            array,
            layout=self.layout if layout is None else layout,
            interpret=self.interpret,
        )

    def gather(self, table: str, column: int) -> Array:
        """Returns the sum of what the warps have shown."""
        return sum_of_warps(self.refs[table], column, interpret=self.interpret)

    def meet(self) -> None:
        """Waits until all threads of the block have come here."""
        meet_all(self.refs["met"], interpret=self.interpret)

    def reached_by(self, samples: list[Array], wanted: Array) -> Array:
        """Returns a number that about `wanted` of the samples reach, or somewhat more; they hold -inf where they end.

        Args:
            samples: flat pieces.
            wanted: float32.
        """

        def ask(middle: Array) -> Array:
            bound = from_ordered(middle)
            count = self.flat_zeros(jnp.int32)
            for x in samples:
                count += (x >= bound).astype(jnp.int32)
            self.store("ints", 0, count, self.flat)
            self.meet()
            found = self.gather("ints", 0)
            self.meet()
            return found

        def is_open(state: tuple[Array, Array, Array]) -> Array:
            low, high, above = state
            return (high - low != 1) & (above.astype(jnp.float32) > _ENOUGH * wanted)

        def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            low, high, above = state
            middle = midpoint(low, high)
            count = ask(middle)
            holds = count.astype(jnp.float32) >= wanted
            return (
                jnp.where(holds, middle, low),
                jnp.where(holds, high, middle),
                jnp.where(holds, count, above),
            )

        everything = jnp.int32(len(samples) * PIECE * self.team.warpgroups)
        start = (ordered(jnp.float32(LOWEST)), ordered(jnp.float32(HIGHEST)), everything)
        low, _, _ = lax.while_loop(is_open, narrow, start)
        return from_ordered(low)

    def zeros(self, dtype: Any) -> Array:  # noqa: ANN401 - a dtype
        """One zero for each place of what `visit_row` hands out."""
        return plgpu.layout_cast(jnp.zeros(self.shape, dtype), self.layout)

    def flat_zeros(self, dtype: Any) -> Array:  # noqa: ANN401 - a dtype
        """One zero for each place of a part of the list."""
        return plgpu.layout_cast(jnp.zeros((PIECE,), dtype), self.flat)
