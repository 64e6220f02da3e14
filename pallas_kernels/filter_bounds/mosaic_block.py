"""One block of the `filter_bounds` kernel: bisection in its row for the k-th logit, then for the nucleus (top-p)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.bisection import (
    HIGHEST,
    LOWEST,
    Bisection,
    Bracket,
    Listed,
    Pass,
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.ordered_floats import ordered
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.row_blocks import fold_ahead
from pallas_kernels.mosaic.teams import PIECE, Team

PIECES = 4
CHUNK = PIECE * PIECES

SAMPLES = 4
LISTED = 1536
"""Wanted length of the first list: more logits than usual filters keep, and few enough for the list's capacity."""


class Block(Bisection):
    """One block's search in its row."""

    def __init__(self, refs: Mapping[str, Ref], *, team: Team, interpret: bool) -> None:
        super().__init__(refs, team=team, interpret=interpret)
        self.row = lax.axis_index("row")
        self.vocab = refs["logits"].shape[1]
        self.best = refs["best"][self.row]
        self.factor = refs["factor"][self.row]

    def run(self) -> None:
        """Writes the row's bound; it is -inf for rows without top-k and top-p and rows whose maximum is not finite."""
        top_k, top_p = self.refs["top_k"][self.row], self.refs["top_p"][self.row]
        by_count = (top_k > 0) & (top_k < self.vocab)
        by_mass = top_p < 1.0
        is_finite = (self.best < HIGHEST) & (self.best > LOWEST)
        is_wanted = (by_count | by_mass) & is_finite

        @pl.when(is_wanted)
        def _() -> None:
            self.write(self.bound(top_k, top_p, by_count, by_mass))

        @pl.when(jnp.logical_not(is_wanted))
        def _() -> None:
            self.write(jnp.float32(LOWEST))

    def write(self, bound: Array) -> None:
        """Writes the result."""

        @pl.when(self.warpgroup == 0)
        def _() -> None:
            assign(self.refs["out"], self.row, bound)

    def bound(self, top_k: Array, top_p: Array, by_count: Array, by_mass: Array) -> Array:
        """Returns the bound of top-p within top-k, or of the only active filter."""
        guess = self.guess()
        seen = self.list_from(guess, jnp.float32(HIGHEST))
        guess = ordered(guess)
        is_listed = seen.fits & (jnp.logical_not(by_count) | (seen.above >= top_k))
        lowest, everything = jnp.float32(LOWEST), jnp.int32(self.vocab)

        def kth() -> tuple[Array, Array]:
            found, bracket = self.find_largest(
                self.around(guess, seen, seen.above >= top_k),
                lambda count, _: count >= top_k,
                lowest,
                Listed(jnp.int32(0), seen.below),
                is_listed,
            )
            return found, bracket.above

        floor, count = lax.cond(by_count, kth, lambda: (lowest, everything))
        return lax.cond(
            by_mass,
            lambda: self.nucleus(top_p, by_count, guess, seen, floor, count, is_listed),
            lambda: floor,
        )

    def around(self, guess: Array, seen: Pass, holds: Array) -> Bracket:
        """Returns the bracket above the guess if the guess satisfies the condition, else the one below it."""
        none, nothing = jnp.int32(0), jnp.float32(0)
        return Bracket(
            jnp.where(holds, guess, ordered(jnp.float32(LOWEST))),
            jnp.where(holds, ordered(self.best) + 1, guess),
            jnp.where(holds, seen.above, jnp.int32(self.vocab)),
            jnp.where(holds, none, seen.above),
            jnp.where(holds, seen.below, nothing),
        )

    def nucleus(
        self,
        top_p: Array,
        by_count: Array,
        guess: Array,
        seen: Pass,
        floor: Array,
        count: Array,
        is_listed: Array,
    ) -> Array:
        """Returns the bound of top-p over the `count` logits >= `floor`, which are all logits without top-k."""
        total = lax.cond(by_count, lambda: self.weight_from(floor, is_listed), lambda: seen.total)
        rest = (1.0 - top_p) * total
        holds = seen.below <= rest
        none, nothing = jnp.int32(0), jnp.float32(0)
        above_floor = Bracket(ordered(floor), ordered(self.best) + 1, count, none, nothing)
        anywhere = self.around(guess, seen, holds)
        bracket = Bracket(
            *(jnp.where(by_count, *pair) for pair in zip(above_floor, anywhere, strict=True))
        )
        found, _ = self.find_largest(
            bracket,
            lambda _, mass: mass <= rest,
            floor,
            Listed(none, jnp.where(by_count, nothing, seen.below)),
            is_listed & (by_count | holds),
        )
        return found

    def weight_from(self, floor: Array, is_listed: Array) -> Array:
        """Returns the weight of the logits >= `floor`; `is_listed` means that the list holds all of them."""
        end = jnp.float32(HIGHEST)
        return lax.cond(
            is_listed,
            lambda: self.count_list(end, floor)[1],
            lambda: self.count_row(end, floor)[1],
        )

    def guess(self) -> Array:
        """Returns a bound that about `LISTED` of the row's logits reach, estimated from a sample."""
        step = (self.vocab - PIECE) // (self.team.warpgroups * SAMPLES - 1) // 4 * 4
        starts = [(self.warpgroup * SAMPLES + sample) * step for sample in range(SAMPLES)]
        samples = [self.load(start) for start in starts]
        wanted = LISTED * (self.team.warpgroups * SAMPLES * PIECE / self.vocab)
        return jnp.minimum(self.reached_by(samples, jnp.float32(wanted)), self.best)

    def weights(self, x: Array) -> Array:
        """Returns unnormalised probabilities; that of the most likely token is 1."""
        return jnp.exp2((x - self.best) * self.factor)

    def visit_row(self, visit: Callable[[Array, Any], Any], state: Any) -> Any:  # noqa: ANN401 - a pytree
        """Folds over the warpgroup's share of the row's chunks; elements that overlap another chunk are -inf."""
        chunks = -(-self.vocab // CHUNK)
        turns = lax.div(chunks - self.warpgroup + self.team.warpgroups - 1, self.team.warpgroups)
        place = plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=self.layout)

        def fetch(index: Array) -> tuple[list[Array], Array, Array]:
            wanted = (self.warpgroup + index * self.team.warpgroups) * CHUNK
            start = jnp.minimum(wanted, self.vocab - CHUNK)
            return [self.load(start + piece * PIECE) for piece in range(PIECES)], wanted, start

        def look(_: Array, chunk: tuple[list[Array], Array, Array], state: Any) -> Any:  # noqa: ANN401 - a pytree
            loaded, wanted, start = chunk
            for piece, x in enumerate(loaded):
                is_new = place >= wanted - start - piece * PIECE
                state = visit(jnp.where(is_new, x, LOWEST), state)
            return state

        return fold_ahead(turns, fetch, look, state)

    def load(self, start: Array) -> Array:
        """Issues the load of a piece of the row."""
        source = self.refs["logits"].at[self.row, pl.ds(start, PIECE)]
        return plgpu.load(source, layout=self.layout, optimized=False)
