"""`grouped_matmul` of MXFP4 and a few rows per group: warps multiply tiles of the weight with `mma.sync`.

A block has a group and some columns of the result. It keeps up to 16 of the group's rows of x in shared memory, and
takes further rows later. A warp multiplies 16 or 32 rows of the weight at once, left operands of `mma.sync`, with all
rows of x that are kept. Four lanes share a row of the weight, and each has a piece of 32 codes of it. So a lane's scale
multiplies its numbers, which stay exact. Codes i and i + 4 of a word are a pair, and so are the numbers of x. Codes are
loaded a turn ahead of their product.

A sum is one accumulator over the pieces in order. Its bits do not depend on which rows of x are kept beside its own.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.device import NUM_MULTIPROCESSORS
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry
from pallas_kernels.mosaic.packed_numbers import E2M1_RATE
from pallas_kernels.mosaic.per_thread import (
    LANES,
    LINES,
    MEMBERS,
    MOST_PLACES,
    WORDS,
    Threads,
    paired,
    run_block,
    thread_kernel,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS

# Numbers in a piece of 16 bytes of codes, and words of x that meet it.
_PIECE, _WORDS_OF_X = 32, 16
# Rows of the weight in a tile, the left operand, and of x in the right one.
_TILE, _ROWS = 2 * LINES, 8
# Words of a turn of a tile that a lane loads: codes of both halves, and their scales.
_LOADED = 2 * WORDS + 2
# Warps of a block, of which a multiprocessor has one; and most words of x that it keeps.
_WARPS, _MOST_KEPT = 16, 54 * 1024
# Most rows per group on average; with more, wgmma is faster.
_MOST_ROWS = 8
# Most rows per group that has any, on average, for which a block keeps 8.
_FEW_ROWS = 4
# Most blocks of a group.
_MOST_PARTS = 16


@dataclass(frozen=True)
class Plan:
    """How the columns of a group are divided.

    Attributes:
        rows: rows of x that a block keeps, 8 or 16.
        parts: blocks of a group.
        columns: columns of a block; the last one may have fewer.
        turns: turns of four pieces in a row of the weight.
        tiles: left operands of a warp, which share what it loads of x.
        warps: warps of a block.
    """

    rows: int
    parts: int
    columns: int
    turns: int
    tiles: int
    warps: int = _WARPS

    @classmethod
    def of(cls, g: Geometry) -> "Plan | None":
        """Returns the plan for a geometry, or `None` if it is not for this kernel."""
        packing = g.packing
        if packing is None or (packing.code, packing.group) != ("float4_e2m1fn", _PIECE):
            return None
        is_few = g.rows <= _MOST_ROWS * g.groups
        if not packing.scales_exactly(g.dtype) or not is_few or is_fixed():
            return None
        # As many groups as rows that choose at random find.
        busy = g.groups * (1 - (1 - 1 / g.groups) ** g.rows)
        turns = ceil(g.inner / (_PIECE * MEMBERS))
        room = _MOST_KEPT // (turns * MEMBERS * _WORDS_OF_X)
        rows = 2 * _ROWS if g.rows > _FEW_ROWS * busy and room >= 2 * _ROWS else _ROWS
        places = g.groups * g.out * g.inner // 8, g.rows * max(g.inner // 2, g.out)
        if room < rows or max(places) > MOST_PLACES:
            return None
        plans = [
            cls(rows, ceil(g.out / columns), columns, turns, tiles)
            for columns in (
                ceil(g.out / parts / _TILE) * _TILE for parts in range(1, _MOST_PARTS + 1)
            )
            for tiles in (2, 1)
        ]
        return min(plans, key=lambda plan: plan.cost(busy))

    def cost(self, busy: float) -> int:
        """Returns how long the last multiprocessor works, in eighths of the time of a warp's product of one tile.

        Storing rows of x takes about as long as such a product, and loading what a warp's tiles share an eighth.

        Args:
            busy: number of groups that have rows.
        """
        waves = ceil(busy * self.parts / NUM_MULTIPROCESSORS)
        return waves * (8 + self.units * (8 * self.tiles + 1))

    @property
    def stride(self) -> int:
        """Words of a row of x in shared memory."""
        return self.turns * MEMBERS * _WORDS_OF_X

    @property
    def width(self) -> int:
        """Columns of a warp at once."""
        return self.tiles * _TILE

    @property
    def units(self) -> int:
        """Times that a warp multiplies its tiles of the weight."""
        return ceil(self.columns / (self.width * self.warps))


@partial(jax.jit, static_argnames=("geometry", "plan", "interpret"))
def grouped_matmul(
    weight: FewBits,
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    geometry: Geometry,
    plan: Plan,
    interpret: bool,
) -> Float[Array, "rows out"]:
    """Implements `api.grouped_matmul` for a geometry with a plan. The interpreter runs blocks of four warps."""
    plan = replace(plan, warps=WARPS) if interpret else plan
    scales = lax.bitcast_convert_type(weight.scales, jnp.uint8)
    arrays = group_sizes.astype(jnp.int32), weight.codes, scales, x
    found = thread_kernel(
        partial(
            run_block,
            partial(multiply, geometry=geometry, plan=plan),
            takes_block=True,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((geometry.rows * geometry.out,), geometry.result),
        name="grouped_matmul_mxfp4",
        blocks=geometry.groups * plan.parts,
        scratch=(plan.rows * plan.stride,),
        warpgroups=plan.warps // WARPS,
        interpret=interpret,
    )(*(array.reshape(-1) for array in arrays))
    return found.reshape(geometry.rows, geometry.out)


def multiply(
    threads: Threads,
    sizes: Ref,
    weight: Ref,
    scales: Ref,
    x: Ref,
    out: Ref,
    kept: Ref,
    block: Any,  # noqa: ANN401 - a word
    *,
    geometry: Geometry,
    plan: Plan,
) -> None:
    """Writes the block's columns of all rows of its group."""
    group, part = block // plan.parts, block % plan.parts
    start = _before(threads, sizes, group, geometry.groups)
    # No row is stored that is not there, even if the sizes are wrong.
    size = threads.least(threads.load(sizes, group), threads.lane * 0 + geometry.rows - start)
    size = threads.most(size, 0)
    product = _Product(threads, weight, scales, kept, group, part * plan.columns, geometry, plan)

    def add_rows(number: Any, _: Any) -> None:  # noqa: ANN401 - words
        """Multiplies the next rows of the group that fit into shared memory."""
        first, left = start + number * plan.rows, size - number * plan.rows
        loaded = product.load(threads.lane * 0)
        # All warps are done with the rows before.
        threads.sync()
        _keep(threads, x, kept, first, left, geometry, plan)

        def add_unit(unit: Any, loaded: list[Any]) -> list[Any]:  # noqa: ANN401 - a word
            sums, loaded = product.of_unit(unit, loaded)
            product.store(out, sums, unit, first, left)
            return loaded

        threads.fold(plan.units, loaded, add_unit)

    threads.repeat((size + (plan.rows - 1)) // plan.rows, add_rows)


class _Product:
    """Products of a block, in the code of a thread.

    Args:
        threads: the threads.
        weight: the words of all codes.
        scales: the e8m0 codes of all scales.
        kept: x in shared memory.
        group: the block's group.
        first: its first column.
        geometry: the geometry.
        plan: the plan.
    """

    def __init__(
        self,
        threads: Threads,
        weight: Ref,
        scales: Ref,
        kept: Ref,
        group: Any,  # noqa: ANN401 - a word
        first: Any,  # noqa: ANN401 - a word
        geometry: Geometry,
        plan: Plan,
    ) -> None:
        self.threads, self.g, self.plan = threads, geometry, plan
        self._weight, self._scales, self._kept = weight, scales, kept
        self._group, self._first = group, first
        self._line, self._member = threads.lane // MEMBERS, threads.lane % MEMBERS
        self._pieces, self._blocks = geometry.inner // _PIECE, plan.rows // _ROWS

    def load(self, step: Any) -> list[Any]:  # noqa: ANN401 - a word
        """Loads what a turn needs of the weight: of each tile, the codes of both halves and their scales.

        Args:
            step: the turn, counted over the units before it too.
        """
        threads, g = self.threads, self.g
        piece = (step % self.plan.turns) * MEMBERS + self._member
        place = threads.least(piece, self._pieces - 1)
        found = []
        for tile in range(self.plan.tiles):
            columns = self._columns(step // self.plan.turns, tile)
            rows = []
            for column in columns:
                own = threads.least(column, g.out - 1)
                grouped = self._group * g.out + own, own * g.groups + self._group
                rows.append(grouped[g.group_axis])
            for row in rows:
                found += threads.load_words(self._weight, (row * self._pieces + place) * WORDS)
            found += [threads.load_byte(self._scales, row * self._pieces + place) for row in rows]
        return found

    def of_unit(self, unit: Any, loaded: list[Any]) -> tuple[list[Any], list[Any]]:  # noqa: ANN401 - a word
        """Returns the sums of a unit, and what is loaded of the next one.

        Args:
            unit: the unit.
            loaded: its first turns, as `load` returns them.
        """
        turns, count = self.plan.turns, 4 * self.plan.tiles * self._blocks

        def add_turn(turn: Any, words: list[Any]) -> list[Any]:  # noqa: ANN401 - a word
            sums, loaded = words[:count], words[count:]
            following = self.load(unit * turns + turn + 1)
            return [*self._added(sums, loaded, turn), *following]

        zeros = [self.threads.lane * 0] * count
        found = self.threads.fold(turns, [*zeros, *loaded], add_turn)
        return found[:count], found[count:]

    def store(self, out: Ref, sums: list[Any], unit: Any, first: Any, left: Any) -> None:  # noqa: ANN401 - words
        """Stores the sums of a unit for the rows of the group that are kept.

        Args:
            out: the result.
            sums: as `of_unit` returns them.
            unit: the unit.
            first: the first row.
            left: number of the group's rows from there on.
        """
        threads, g = self.threads, self.g
        each, rate = iter(sums), threads.constant(1 / E2M1_RATE)
        for tile in range(self.plan.tiles):
            columns = self._columns(unit, tile)
            for block in range(self._blocks):
                for column in columns:
                    is_own = (column < self._first + self.plan.columns) & (column < g.out)
                    for one in (0, 1):
                        row = self._member * 2 + (block * _ROWS + one)
                        place = (first + row) * g.out + column
                        number = threads.product(next(each), rate)
                        threads.store_number(out, place, number, where=is_own & (row < left))

    def _columns(self, unit: Any, tile: int) -> list[Any]:  # noqa: ANN401 - a word
        """Returns the lane's columns in both halves of a tile; they may be behind those of the block."""
        begin = (unit * self.plan.warps + self.threads.warp) * self.plan.width + self._first
        own = begin + self._line + tile * _TILE
        return [own, own + LINES]

    def _added(self, sums: list[Any], loaded: list[Any], turn: Any) -> list[Any]:  # noqa: ANN401 - a word
        """Returns the sums with the products of a turn added."""
        threads, blocks = self.threads, self._blocks
        each = [sums[at : at + 4] for at in range(0, len(sums), 4)]
        piece = turn * MEMBERS + self._member
        turned = (self._member // 2) + (self._line % 2) * 2
        for at in range(WORDS):
            rights = [
                threads.load_words(
                    self._kept,
                    (self._line + block * _ROWS) * self.plan.stride
                    + piece * _WORDS_OF_X
                    + (turned ^ at) * WORDS,
                )
                for block in range(blocks)
            ]
            for tile in range(self.plan.tiles):
                own = loaded[tile * _LOADED : (tile + 1) * _LOADED]
                low, high = (
                    threads.scaled_pairs(own[half * WORDS + at], own[2 * WORDS + half])
                    for half in (0, 1)
                )
                for block, right in enumerate(rights):
                    place = tile * blocks + block
                    each[place] = threads.word_product(each[place], low, high, right, "bfloat16")
        return [number for own in each for number in own]


def _before(threads: Threads, sizes: Ref, group: Any, groups: int) -> Any:  # noqa: ANN401 - words
    """Returns the number of rows of the groups before one."""
    total = threads.lane * 0
    for begin in range(0, groups, LANES):
        other = threads.lane + begin
        size = threads.load(sizes, threads.least(other, groups - 1))
        total = total + threads.select(other < group, size, 0)
    # The last lane has the sum of all, which is the largest.
    return threads.most_of_warp(threads.sum_in_warp(total))


def _keep(
    threads: Threads,
    x: Ref,
    kept: Ref,
    first: Any,  # noqa: ANN401 - a word
    left: Any,  # noqa: ANN401 - a word
    g: Geometry,
    plan: Plan,
) -> None:
    """Stores rows of x in shared memory, in pairs and with zeros behind each, and waits for all.

    Pieces of 16 bytes are permuted, so that lanes that load at the same time meet different banks.
    """
    of_row = plan.stride // WORDS
    count = plan.rows * of_row

    def store(number: Any, _: list[Any]) -> list[Any]:  # noqa: ANN401 - a word
        unit = number * (plan.warps * LANES) + threads.number
        row, part = unit // of_row, unit % of_row
        source = (first + threads.least(row, left - 1)) * (g.inner // 2)
        place = threads.least(part, g.inner // (2 * WORDS) - 1) * WORDS
        words = threads.load_words(x, source + place)
        is_there = part < g.inner // (2 * WORDS)
        pairs = [threads.select(is_there, pair, 0) for pair in paired(words)]
        piece, at = part // WORDS, part % WORDS
        turned = at ^ ((piece // 2) % 2 + (row % 2) * 2)
        target = row * plan.stride + piece * _WORDS_OF_X + turned * WORDS
        threads.store_words(kept, target, pairs, where=unit < count)
        return []

    threads.fold(ceil(count / (plan.warps * LANES)), [], store)
    threads.sync()
