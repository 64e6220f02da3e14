"""The Mosaic GPU kernel that selects the largest scores: one block per token finds the bound and writes slots in order.

It first tries the one-pass selection (`mosaic_one_pass`). Otherwise it reads a row of scores three times: to list the
candidates, to count the selected scores in each warp's equal part of the row, and to write.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int

from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    RESERVED_BYTES_PER_BLOCK,
    SHARED_BYTES,
)
from pallas_kernels.index_topk.mosaic_one_pass import (
    SAMPLES,
    OnePass,
    scratch_of_one_pass,
    shared_bytes,
    supports,
)
from pallas_kernels.index_topk.mosaic_places import bounded, write_places
from pallas_kernels.mosaic.bisection import (
    HIGHEST,
    LOWEST,
    Bisection,
    Bracket,
    Listed,
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.loads import gather
from pallas_kernels.mosaic.ordered_floats import ordered
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.row_blocks import fold_ahead, run_blocks
from pallas_kernels.mosaic.teams import LARGE, MEDIUM, PIECE, SMALL, Team

STEP = 2048

# Bytes of shared memory that do not depend on the shapes.
_OTHER_BYTES = 3072
# Wanted length of the first list, as a multiple of topk.
_MARGIN = 1.3


@partial(jax.jit, static_argnames=("topk", "page_size", "num_slots", "interpret"))
def select(
    scores: Float32[Array, "tokens keys"],
    seen: Int[Array, " tokens"],
    rows: Int[Array, " tokens"] | None,
    page_table: Int[Array, "rows table_width"],
    *,
    topk: int,
    page_size: int,
    num_slots: int,
    interpret: bool = False,
) -> Int[Array, "tokens topk"]:
    """Returns the slots of the `topk` largest of each token's first `seen` scores, in the order of `api.index_topk`.

    Args:
        scores: a multiple of `CHUNK` per token. The first `seen` must not be NaN; the others may have any value.
        seen: number of keys that each token sees.
        rows: row of the page table of each token; `None` if token t has row t.
        page_table: int32 page ids of each row.
        topk: number of selected keys.
        page_size: tokens per page, a power of two.
        num_slots: padding value of unused entries.
        interpret: whether to run in Pallas's interpreter on the CPU, slowly.
    """
    tokens, keys = scores.shape
    room = _room(topk)
    team = _team_for(tokens, keys, topk)
    shared = {"places": plgpu.SMEM((room,), jnp.int32)}
    if supports(keys, topk):
        shared |= scratch_of_one_pass(keys, team)
    arrays = {
        "scores": scores,
        "by_warp": scores.reshape(tokens, team.warps, keys // team.warps),
        "seen": seen,
        "page_table": page_table,
    }
    if rows is not None:
        arrays["rows"] = rows
    options = {"topk": topk, "page_size": page_size, "num_slots": num_slots}
    slots = run_blocks(
        "index_topk",
        lambda refs: _Block(refs, **options, team=team, interpret=interpret).run(),
        arrays,
        jax.ShapeDtypeStruct((tokens, room), jnp.int32),
        team=team,
        shared=shared,
        interpret=interpret,
    )
    return slots[:, :topk]


def _room(topk: int) -> int:
    """Returns the padded number of output entries per token."""
    return -(-topk // PIECE) * PIECE


def _team_for(tokens: int, keys: int, topk: int) -> Team:
    """Returns the fastest block configuration: short lists if possible, and small blocks if two fit on an SM."""
    if not supports(keys, topk) or 2 * topk > SMALL.listed:
        return LARGE
    needed = shared_bytes(keys, SMALL) + 4 * _room(topk) + _OTHER_BYTES + RESERVED_BYTES_PER_BLOCK
    return SMALL if tokens > NUM_MULTIPROCESSORS and 2 * needed <= SHARED_BYTES else MEDIUM


class _Block(Bisection):
    """One block, which selects for one token."""

    has_weights = False

    def __init__(
        self,
        refs: Mapping[str, Ref],
        *,
        topk: int,
        page_size: int,
        num_slots: int,
        team: Team,
        interpret: bool,
    ) -> None:
        super().__init__(refs, team=team, interpret=interpret)
        self.topk, self.page_size, self.num_slots = topk, page_size, num_slots
        self.token = lax.axis_index("row")
        self.seen = refs["seen"][self.token]
        self.place = plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=self.flat)

    def run(self) -> None:
        """Writes the token's slots; if all keys are selected there is no search."""
        is_all = self.seen <= self.topk
        pl.when(jnp.logical_not(is_all))(self.choose)
        for start in range(0, self.refs["out"].shape[1], PIECE * self.team.warpgroups):
            self.write(start + self.warpgroup * PIECE, is_all)

    def write(self, start: Array, is_all: Array) -> None:
        """Converts a piece of the selected positions to slots."""
        out = self.refs["out"]

        @pl.when(start < out.shape[1])
        def _() -> None:
            piece = pl.ds(start, PIECE)
            chosen = plgpu.load(self.refs["places"].at[piece], layout=self.flat, optimized=False)
            count = start + self.place
            is_real = count < jnp.minimum(self.seen, self.topk)
            # Unused entries must not index outside of the page table.
            position = jnp.where(is_real, jnp.where(is_all, count, chosen), 0)
            bits = self.page_size.bit_length() - 1
            page = lax.shift_right_logical(position, jnp.full_like(position, bits))
            row = self.refs["rows"][self.token] if "rows" in self.refs else self.token
            page = gather(
                self.refs["page_table"], row, page, layout=self.flat, interpret=self.interpret
            )
            slot = page * self.page_size + (position & (self.page_size - 1))
            assign(out, (self.token, piece), jnp.where(is_real, slot, self.num_slots))

    def choose(self) -> None:
        """Finds the smallest selected score, and writes the positions of all selected scores."""
        if supports(self.refs["scores"].shape[1], self.topk):
            OnePass(self).choose(partial(self.search, fits=jnp.bool_(False)))
            return
        guess = self.guess()
        met = self.list_from(guess, jnp.float32(HIGHEST))
        self.search(guess, met.above, met.fits)

    def search(self, guess: Array, above: Array, fits: Array) -> None:
        """Runs the slower path from a guess; `above` scores reach it, and `fits` is whether the list holds them."""
        holds = above >= self.topk
        guess, none = ordered(guess), jnp.int32(0)
        nothing = jnp.float32(0)
        bracket = Bracket(
            jnp.where(holds, guess, ordered(jnp.float32(LOWEST))),
            jnp.where(holds, ordered(jnp.float32(HIGHEST)), guess),
            jnp.where(holds, above, self.seen),
            jnp.where(holds, none, above),
            nothing,
        )
        bound, bracket = self.find_largest(
            bracket,
            lambda count, _: count >= self.topk,
            jnp.float32(LOWEST),
            Listed(none, nothing),
            holds & fits,
        )
        # No score lies between the bound and the bracket's upper end, so `over` scores are above the bound.
        write_places(self, bound, self.topk - bracket.over)

    def guess(self) -> Array:
        """Returns a bound that somewhat more than `topk` scores reach, estimated from a sample."""
        last = jnp.maximum(self.seen - PIECE, 0)
        samples, count = [], self.zeros(jnp.int32)
        share = SAMPLES // self.team.warpgroups
        for sample in range(share):
            turn = self.warpgroup * share + sample
            start = lax.div(turn * lax.div(last, 4), SAMPLES - 1) * 4
            is_seen = self.place + start < self.seen
            samples.append(jnp.where(is_seen, self.load(start), LOWEST))
            count += is_seen.astype(jnp.int32)
        self.store("ints", 0, count)
        self.sync()
        share = self.gather("ints", 0).astype(jnp.float32) / self.seen.astype(jnp.float32)
        self.sync()
        return self.reached_by(samples, _MARGIN * self.topk * share)

    def weights(self, x: Array) -> Array:
        """Returns zeros; this selection has no weights."""
        return jnp.zeros_like(x)

    def visit_row(self, visit: Callable[[Array, Any], Any], state: Any) -> Any:  # noqa: ANN401 - a pytree
        """Folds over the warpgroup's share of the visible scores."""
        chunks = lax.div(self.seen + STEP - 1, STEP)
        warpgroups = self.team.warpgroups
        turns = lax.div(chunks - self.warpgroup + warpgroups - 1, warpgroups)

        def fetch(index: Array) -> list[Array]:
            first = (self.warpgroup + index * warpgroups) * STEP
            return [self.load(first + start) for start in range(0, STEP, PIECE)]

        def look(index: Array, loaded: list[Array], state: Any) -> Any:  # noqa: ANN401 - a pytree
            first = (self.warpgroup + index * warpgroups) * STEP
            for piece, x in enumerate(loaded):
                is_seen = self.place + (first + piece * PIECE) < self.seen
                state = visit(jnp.where(is_seen, x, LOWEST), state)
            return state

        return fold_ahead(turns, fetch, look, state)

    def load(self, start: Array) -> Array:
        """Issues the load of a piece of the row."""
        source = self.refs["scores"].at[self.token, pl.ds(start, PIECE)]
        return bounded(plgpu.load(source, layout=self.flat, optimized=False))
