"""Selection within a row of float32 values by bisection, without sorting: a threshold for top-k or for a weight sum.

One block selects in one row. Bisection runs on integers that order as floats do (`ordered_floats.py`). Each step counts
the values >= a bound, or sums the weights below it. A step over a whole row takes microseconds. Therefore one pass
first appends the values above a guessed bound to a list in shared memory, and later steps read the list. The row is
read again only if the guess was too high, or so low that the list overflowed; the bracket then shrinks until its values
fit the list.

All threads of a block hold the same scalars and take the same branches. The order of every sum depends on shapes alone,
so results are deterministic. Values must not be NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.lists import append
from pallas_kernels.mosaic.ordered_floats import from_ordered, ordered
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import flat_pieces
from pallas_kernels.mosaic.teams import PIECE, Team
from pallas_kernels.mosaic.warps import WARPS, store_warp_sums, sum_of_warps, sync_block

_ENOUGH = 1.2
"""`reached_by` stops once at most this multiple of the wanted samples reaches its bound."""

LOWEST = np.float32(-np.inf)
HIGHEST = np.float32(np.inf)


def midpoint(low: Array, high: Array) -> Array:
    """Returns the mean of two integers, without overflow."""
    return (low & high) + lax.shift_right_arithmetic(low ^ high, 1)


class Bracket(NamedTuple):
    """State of a bisection: the largest bound that satisfies the condition lies in [low, high).

    Attributes:
        low: a bound that satisfies the condition, as an ordered integer.
        high: a larger bound that does not, as an ordered integer.
        above: number of values >= `low`.
        over: number of values >= `high`.
        below: total weight of the values from the floor up to, but excluding, `low`.
    """

    low: Array
    high: Array
    above: Array
    over: Array
    below: Array

    @property
    def is_isolated(self) -> Array:
        """Whether the bracket holds a single element, or several elements of one value."""
        return self.is_one_value | (self.above - self.over == 1)

    @property
    def is_one_value(self) -> Array:
        """Whether `low` is the only float in [low, high)."""
        return self.high - self.low == 1

    @property
    def middle(self) -> Array:
        """The midpoint of the bracket, as an ordered integer."""
        return midpoint(self.low, self.high)

    def narrowed(self, middle: Array, holds: Array, count: Array, mass: Array) -> "Bracket":
        """Returns the half of the bracket that remains: the upper half if `middle` satisfies the condition."""
        return Bracket(
            jnp.where(holds, middle, self.low),
            jnp.where(holds, self.high, middle),
            jnp.where(holds, count, self.above),
            jnp.where(holds, self.over, count),
            jnp.where(holds, mass, self.below),
        )


class Listed(NamedTuple):
    """Totals over the values of the row that are outside the list.

    Attributes:
        over: number of values above the listed range.
        below: total weight of the values below the listed range.
    """

    over: Array
    below: Array


class Pass(NamedTuple):
    """Result of one pass over the row that fills the list.

    Attributes:
        above: number of values >= the bound.
        below: total weight of the values < the bound.
        total: total weight of the row.
        fits: whether the list did not overflow.
    """

    above: Array
    below: Array
    total: Array
    fits: Array


class Bisection(ABC):
    """One block's selection in its row; a subclass reads the row and defines the weights.

    Attributes:
        refs: the kernel's refs by name, including the team's `scratch`.
        team: the block's warpgroups.
        shape: shape of the arrays that `visit_row` passes to its callback, 4 elements per thread.
        layout: register layout of these arrays.
        has_weights: whether weights are summed; if not, every weight sum is 0.
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
        """Folds `visit(values, state)` over the warpgroup's share of the row; elements past the end are -inf."""

    @abstractmethod
    def weights(self, x: Array) -> Array:
        """Returns the weight of each value, 0 for -inf."""

    def find_largest(
        self,
        bracket: Bracket,
        holds: Callable[[Array, Array], Array],
        floor: Array,
        listed: Listed,
        is_listed: Array,
    ) -> tuple[Array, Bracket]:
        """Returns the largest value of the row that satisfies a condition, and the bracket that isolates it.

        Args:
            bracket: the range to search.
            holds: the condition, given the number of values >= a bound and the weight from `floor` up to the bound.
            floor: values below it contribute no weight.
            listed: totals over the values outside the list.
            is_listed: whether the list holds all values in the bracket.
        """

        def narrow(count_from: Callable[[Array], tuple[Array, Array]], bracket: Bracket) -> Bracket:
            middle = bracket.middle
            count, mass = count_from(from_ordered(middle))
            return bracket.narrowed(middle, holds(count, mass), count, mass)

        def in_row(bound: Array) -> tuple[Array, Array]:
            return self.count_row(bound, floor)

        def is_unlisted(state: tuple) -> Array:
            return jnp.logical_not(state[3])

        def list_it(state: tuple) -> tuple:
            bracket, _, few, _ = state
            bracket = lax.while_loop(
                lambda now: jnp.logical_not(now.is_isolated) & (now.above - now.over > few),
                lambda now: narrow(in_row, now),
                bracket,
            )
            # A bracket of one value needs no list, however many elements share that value.
            found = self.list_from(from_ordered(bracket.low), from_ordered(bracket.high))
            return (
                bracket,
                Listed(bracket.over, bracket.below),
                few // 16,
                found.fits | bracket.is_one_value,
            )

        # Half of the capacity: the warps' parts of the list may fill unevenly.
        few = jnp.int32(self.team.listed // 2)
        state = (bracket, listed, few, is_listed)
        bracket, listed, _, _ = lax.while_loop(is_unlisted, list_it, state)

        def in_list(bound: Array) -> tuple[Array, Array]:
            count, mass = self.count_list(bound, floor)
            return listed.over + count, listed.below + mass

        bracket = lax.while_loop(
            lambda now: jnp.logical_not(now.is_isolated), lambda now: narrow(in_list, now), bracket
        )
        bound = lax.cond(
            bracket.is_one_value,
            lambda: from_ordered(bracket.low),
            lambda: self.single_value(from_ordered(bracket.low), from_ordered(bracket.high)),
        )
        return bound, bracket

    def list_from(self, low: Array, high: Array) -> Pass:
        """Fills the list with the values in [low, high); counts and weighs the whole row against `low`."""
        room = WARPS * self.team.room
        first = self.warpgroup * room
        for start in range(0, room, PIECE):
            empty = jnp.full((PIECE,), LOWEST, jnp.float32)
            place = pl.ds(first + start, PIECE)
            assign(self.refs["found"], place, plgpu.layout_cast(empty, self.flat))
        self.sync()

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
        self.sync()
        longest = self.refs["ints"][0, 1]
        for warp in range(1, self.team.warps):
            longest = jnp.maximum(longest, self.refs["ints"][warp, 1])
        # `lengths` holds a warp's list length once per element of the warp, so its sum is a multiple of the length.
        # The interpreter keeps one list per warpgroup.
        most = PIECE * room if self.interpret else PIECE // WARPS * self.team.room
        columns = (("ints", 0), ("floats", 0), ("floats", 1))
        above, below, total = (self.gather(*column) for column in columns)
        found = Pass(above, below, total, longest <= most)
        self.sync()
        return found

    def count_row(self, bound: Array, floor: Array) -> tuple[Array, Array]:
        """Returns the number of values of the row >= `bound`, and the weight of those in [floor, bound)."""

        def visit(x: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            return self.add_values(x, state, bound, floor)

        state = (self.zeros(jnp.int32), self.zeros(jnp.float32))
        return self.summed(self.visit_row(visit, state), self.layout)

    def count_list(self, bound: Array, floor: Array) -> tuple[Array, Array]:
        """Returns the same over the list instead of the row."""
        state = (self.flat_zeros(jnp.int32), self.flat_zeros(jnp.float32))
        for x in self.load_list():
            state = self.add_values(x, state, bound, floor)
        return self.summed(state, self.flat)

    def add_values(
        self, x: Array, state: tuple[Array, Array], bound: Array, floor: Array
    ) -> tuple[Array, Array]:
        """Adds the values `x` to each thread's partial count and weight."""
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
        """Returns a count and a weight summed over all threads of the block."""
        count, mass = state
        self.store("ints", 0, count, layout)
        if self.has_weights:
            self.store("floats", 0, mass, layout)
        self.sync()
        weight = self.gather("floats", 0) if self.has_weights else jnp.float32(0)
        found = self.gather("ints", 0), weight
        self.sync()
        return found

    def single_value(self, low: Array, high: Array) -> Array:
        """Returns the only value of the list in [low, high)."""
        total = self.flat_zeros(jnp.float32)
        for x in self.load_list():
            total += jnp.where((x >= low) & (x < high), x, 0.0)
        self.store("floats", 0, total, self.flat)
        self.sync()
        found = self.gather("floats", 0)
        self.sync()
        return found

    def load_list(self) -> list[Array]:
        """Returns the warpgroup's part of the list; unused entries are -inf."""
        room = WARPS * self.team.room
        first = self.warpgroup * room
        parts = [pl.ds(first + start, PIECE) for start in range(0, room, PIECE)]
        return [
            plgpu.load(self.refs["found"].at[part], layout=self.flat, optimized=False)
            for part in parts
        ]

    def store(self, table: str, column: int, array: Array, layout: Layout = None) -> None:
        """Stores each warp's sum in shared memory; other threads may read it after `sync`."""
        store_warp_sums(
            self.refs[table],
            self.warpgroup * WARPS,
            column,
            array,
            layout=self.layout if layout is None else layout,
            interpret=self.interpret,
        )

    def gather(self, table: str, column: int) -> Array:
        """Returns the sum over the block of what its warps have stored."""
        return sum_of_warps(self.refs[table], column, interpret=self.interpret)

    def sync(self) -> None:
        """Waits at a barrier of all threads of the block."""
        sync_block(self.refs["all_arrived"], interpret=self.interpret)

    def reached_by(self, samples: list[Array], wanted: Array) -> Array:
        """Returns a bound that at least `wanted` samples reach, and few more than that (`_ENOUGH`).

        Args:
            samples: float32 arrays in the flat layout, padded with -inf.
            wanted: number of samples, float32.
        """

        def count_samples(middle: Array) -> Array:
            bound = from_ordered(middle)
            count = self.flat_zeros(jnp.int32)
            for x in samples:
                count += (x >= bound).astype(jnp.int32)
            self.store("ints", 0, count, self.flat)
            self.sync()
            found = self.gather("ints", 0)
            self.sync()
            return found

        def is_open(state: tuple[Array, Array, Array]) -> Array:
            low, high, above = state
            return (high - low != 1) & (above.astype(jnp.float32) > _ENOUGH * wanted)

        def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            low, high, above = state
            middle = midpoint(low, high)
            count = count_samples(middle)
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
        """Returns zeros with the shape and layout of the arrays of `visit_row`."""
        return plgpu.layout_cast(jnp.zeros(self.shape, dtype), self.layout)

    def flat_zeros(self, dtype: Any) -> Array:  # noqa: ANN401 - a dtype
        """Returns zeros with the shape and layout of the arrays of `load_list`."""
        return plgpu.layout_cast(jnp.zeros((PIECE,), dtype), self.flat)
