"""Writes the selected positions in order, in two passes over a row of scores: count, then write.

Each warp has an equal part of the row, so the counts of the preceding warps give the index of its first position.
"""

from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.lists import place_chosen
from pallas_kernels.mosaic.rows import row_pieces
from pallas_kernels.mosaic.teams import LARGE
from pallas_kernels.mosaic.warps import WARPS, store_warp_sums, sums_before

CHUNK = 8192
"""The length of a row of scores is a multiple of this: 4 warpgroups * `STEP` = 16 warps * `_TOGETHER` pieces."""

_COLUMNS = 128
_TOGETHER = CHUNK // LARGE.warps // _COLUMNS
_LARGEST = float(np.finfo(np.float32).max)


def write_places(block: Any, bound: Array, ties: Array) -> None:  # noqa: ANN401 - its own kernel's block
    """Writes the positions of all scores above the bound and of the first `ties` equal to it, in order."""
    if block.interpret:
        write_places_plainly(block, bound, ties)
        block.sync()
        return
    shares = _Shares(block)
    before = shares.counts_before(bound)

    def write(turn: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
        for x, position in shares.load(turn):
            before = place_chosen(
                block.refs["places"], x, position, bound, ties, before, layout=shares.layout
            )
        return before

    lax.fori_loop(jnp.int32(0), shares.turns, write, before)
    block.sync()


class _Shares:
    """The parts of a row that the warps of a warpgroup have, read piece by piece."""

    def __init__(self, block: Any) -> None:  # noqa: ANN401 - its own kernel's block
        self.block, self.row = block, block.warpgroup * WARPS
        (piece,) = row_pieces(WARPS, _COLUMNS, 4)
        self.layout = piece.layout
        columns = block.refs["by_warp"].shape[2]
        iota = partial(plgpu.broadcasted_iota, jnp.int32, (WARPS, _COLUMNS), layout=self.layout)
        self.place = (self.row + iota(0)) * columns + iota(1)
        # All warps of a warpgroup loop as far as its first one needs to.
        needed = jnp.clip(block.seen - self.row * columns, 0, columns)
        self.turns = lax.div(needed + _COLUMNS * _TOGETHER - 1, _COLUMNS * _TOGETHER)

    def load(self, turn: Array) -> list[tuple[Array, Array]]:
        """Returns scores and their positions; scores of keys that the token does not see are NaN."""
        loaded = []
        for part in range(_TOGETHER):
            column = (turn * _TOGETHER + part) * _COLUMNS
            rows, span = pl.ds(self.row, WARPS), pl.ds(column, _COLUMNS)
            source = self.block.refs["by_warp"].at[self.block.token, rows, span]
            x = plgpu.load(source, layout=self.layout, optimized=False)
            loaded.append((x, self.place + column))
        return [
            (jnp.where(position < self.block.seen, bounded(x), np.float32(np.nan)), position)
            for x, position in loaded
        ]

    def counts_before(self, bound: Array) -> tuple[Array, Array]:
        """Returns for each warp the numbers of scores before its part that are above a bound and equal to it."""

        def count(turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            above, equal = state
            for x, _ in self.load(turn):
                above += (x > bound).astype(jnp.int32)
                equal += (x == bound).astype(jnp.int32)
            return above, equal

        shape, layout, table = (WARPS, _COLUMNS), self.layout, self.block.refs["ints"]
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
        counts = lax.fori_loop(jnp.int32(0), self.turns, count, (zero, zero))
        for column, array in enumerate(counts):
            store_warp_sums(table, self.row, column, array, layout=layout, interpret=False)
        self.block.sync()
        above, equal = (
            sums_before(table, self.row, column, shape, layout=layout) for column in (0, 1)
        )
        return above, equal


def write_places_plainly(block: Any, bound: Array, ties: Array) -> None:  # noqa: ANN401 - its own kernel's block
    """Does the same as `write_places`, for the interpreter, in the first warpgroup only."""

    @pl.when(block.warpgroup == 0)
    def _() -> None:
        x = bounded(block.refs["scores"][block.token, :])
        position = jnp.arange(len(x), dtype=jnp.int32)
        is_equal = (x == bound) & (position < block.seen)
        is_early = is_equal & (jnp.cumsum(is_equal, dtype=jnp.int32) <= ties)
        chosen = ((x > bound) & (position < block.seen)) | is_early
        places = block.refs["places"]
        at = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, places.shape[0])
        written = jnp.zeros(places.shape, jnp.int32).at[at].set(position, mode="drop")
        assign(places, ..., written)


def bounded(x: Array) -> Array:
    """Returns scores with +inf replaced by the largest finite float32."""
    return jnp.minimum(x, _LARGEST)
