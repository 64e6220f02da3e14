"""`gathered_matmul` of codes of 4 bits: the four warps of a block multiply a tile of the weight with tensor cores.

A tile is 16 rows of the weight, the left operand of `mma.sync`, in two halves: adjacent columns of the result, gates
and their other factors, or the rows of two choices that are added up. Four lanes share a row, and each has a piece of
32 codes of it, which has a scale of its own. So the right operand has a column for each half and piece, which is 0
outside of the piece: column `4 * half + piece` of the product is what that half of the rows gets from the piece, before
its scale. Codes i and i + 4 of a word are a pair, and so are the numbers of x, which a block keeps in shared memory in
that order.

A warp has every fourth *turn*, four pieces of each row. At the end the sums of the warps meet in shared memory.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gathered_matmul.geometry import Geometry
from pallas_kernels.gathered_matmul.mosaic_ending import added_bias, group_of, store_column
from pallas_kernels.mosaic.per_thread import LINES, MEMBERS, THREADS, WORDS, Threads, paired
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS

# Words of x that meet a piece.
_WORDS_OF_X = 16
# Words between x and the zeros behind it in shared memory, which are then in other banks than what is read beside them.
_GAP = 8
# Turns whose loads come before their products. A block that adds up choices keeps more of x, so fewer blocks hide them.
_AT_ONCE, _AT_ONCE_OF_SUMS = 2, 6


def scratch(g: Geometry) -> tuple[int, int]:
    """Returns the sizes of a block's arrays in shared memory: x, with zeros behind it, and the sums of the warps."""
    return g.kept + _GAP + _WORDS_OF_X, WARPS * 2 * LINES


def multiply(
    threads: Threads,
    x: Ref,
    chosen: Ref,
    *others: Any,  # noqa: ANN401 - weights of choices, bias, weight, scales, zero points, result, scratch, block
    geometry: Geometry,
) -> None:
    """Writes the block's columns: of a choice, or of the weighted sum over a row's choices."""
    g = geometry
    weights, others = (others[0], others[1:]) if g.summed else (None, others)
    bias, others = (others[0], others[1:]) if g.bias is not None else (None, others)
    weight, *factors, out, kept, sums, block = others
    parts = ceil(g.results / g.columns)
    # A choice or, if choices are added up, a row.
    task, first = block // parts, (block % parts) * g.columns
    product = _Product(threads, weight, factors, kept, g)
    if weights is None:
        begin = task if g.each else task // g.count
        group = group_of(threads, chosen, task, g)
        tiles = [_Tile(product.rows([group, group], first))]
    else:
        begin = task * g.count if g.each else task
        tiles = [
            _tile_of_choices(product, chosen, weights, task, choice, first)
            for choice in range(0, g.count, 2)
        ]
    # The first codes are on their way while x is stored.
    loaded = product.load(tiles[0], threads.lane * 0)
    _keep(threads, x, kept, begin, g)
    total = product.added(threads.lane * 0, tiles[0], loaded)
    total = product.added_turns(total, tiles[0], 1)
    for tile in tiles[1:]:
        total = product.added_turns(total, tile, 0)
    _store_sums(threads, sums, total, g)
    column = threads.least(threads.number, g.columns - 1)
    own = threads.least(first + column, g.results - 1)
    is_wanted = (threads.number < g.columns) & (first + threads.number < g.results)
    halves = (0, LINES) if g.epilogue.gated else (0,)
    found = [_of_warps(threads, sums, column + half) for half in halves]
    if weights is None:
        group = group_of(threads, chosen, task, g)
        store_column(threads, found, task, group, own, factors, bias, out, g, where=is_wanted)
        return
    added = added_bias(threads, task, own, chosen, weights, bias, g)
    total = threads.multiply_add(found[0], threads.constant(1.0), added)
    threads.store_number(out, task * g.results + own, total, where=is_wanted)


@dataclass(frozen=True)
class _Tile:
    """A tile, as a lane sees it.

    Attributes:
        rows: of each half, the row of the weight that the lane has pieces of.
        rows_of_x: for each half, which of the kept rows of x it is multiplied with.
        shares: the weight of each half's choice, if choices are added up.
        has_both: whether the second half counts.
    """

    rows: list[Any]
    rows_of_x: tuple[int, int] = (0, 0)
    shares: tuple[Any, ...] = ()
    has_both: bool = True


class _Product:
    """Products of tiles, in the code of a thread.

    Args:
        threads: the threads.
        weight: the words of the codes.
        factors: scales and zero points.
        kept: x in shared memory.
        g: the geometry.
    """

    def __init__(
        self, threads: Threads, weight: Ref, factors: list[Ref], kept: Ref, g: Geometry
    ) -> None:
        self.threads, self.g = threads, g
        self._weight, self._factors, self._kept = weight, factors, kept
        self._line, self._member = threads.lane // MEMBERS, threads.lane % MEMBERS
        self._pieces, self._group = g.words // WORDS, g.inner // g.scales
        turns = ceil(self._pieces / (MEMBERS * WARPS))
        self._at_once = min(turns, _AT_ONCE_OF_SUMS if g.summed else _AT_ONCE)
        self._rounds = ceil(turns / self._at_once)

    def rows(self, groups: list[Any], first: Any) -> list[Any]:  # noqa: ANN401 - words
        """Returns the rows of the weight that the lane has pieces of, one in each half.

        Args:
            groups: the group of each half.
            first: the first column of the tile.
        """
        g, threads = self.g, self.threads
        columns = [first + self._line, first + self._line]
        if g.columns > LINES:
            columns[1] = columns[1] + LINES
        columns = [threads.least(column, g.results - 1) for column in columns]
        if g.epilogue.gated:
            columns[1] = columns[1] + g.results
        return [g.row(group, column) for group, column in zip(groups, columns, strict=True)]

    def added_turns(self, total: Any, tile: _Tile, begin: int) -> Any:  # noqa: ANN401 - numbers
        """Returns the lane's total with the products of a tile added, from a round of turns on."""

        def add_round(at: Any, words: list[Any]) -> list[Any]:  # noqa: ANN401 - a word
            at = at + begin
            return [self.added(words[0], tile, self.load(tile, at))]

        return self.threads.fold(self._rounds - begin, [total], add_round)[0]

    def load(self, tile: _Tile, number: Any) -> list["_Turn"]:  # noqa: ANN401 - a word
        """Loads what a round of turns of a tile needs of the weight."""
        turns = [
            (number * self._at_once + at) * WARPS + self.threads.warp for at in range(self._at_once)
        ]
        return [self._loaded(tile, turn * MEMBERS) for turn in turns]

    def added(self, total: Any, tile: _Tile, turns: list["_Turn"]) -> Any:  # noqa: ANN401 - numbers
        """Returns the lane's total with the products of turns added."""
        threads, g = self.threads, self.g
        dtype = jnp.dtype(g.dtype).name
        for turn in turns:
            products = [threads.lane * 0] * 4
            for at, right in enumerate(self._right(tile, turn.piece)):
                low, high = (
                    threads.pairs(words[at], g.kind, dtype, zero)
                    for words, zero in zip(turn.codes, turn.zeros, strict=True)
                )
                products = threads.word_product(products, low, high, right, dtype)
            own = [self._of_half([products[at], products[at + 2]]) for at in (0, 1)]
            total = self._scaled(total, own, tile, turn.scales)
        return total

    def _loaded(self, tile: _Tile, first: Any) -> "_Turn":  # noqa: ANN401 - a word
        """Loads a turn; of a piece behind the end of a row it has the last one."""
        threads, g = self.threads, self.g
        piece = first + self._member
        place = threads.least(piece, self._pieces - 1)
        codes = [
            threads.load_words(self._weight, row * g.words + place * WORDS) for row in tile.rows
        ]
        zeros = [None, None]
        if g.has_zeros:
            zeros = [
                threads.load_number(self._factors[1], self._factor(row, place)) for row in tile.rows
            ]
        if g.has_row_scales:
            return _Turn(piece, codes, zeros, [])
        # The lane's products are those of two adjacent pieces with a row of one half.
        own = first + (self._member % 2) * 2
        return _Turn(piece, codes, zeros, self._scales(self._of_half(tile.rows), own))

    def _scales(self, row: Any, piece: Any) -> list[Any]:  # noqa: ANN401 - words
        """Returns the scales of two pieces of a row, or the one scale of both."""
        threads, g = self.threads, self.g
        if self._group == g.piece and self._pieces % 2 == 0:
            first = threads.least(piece, self._pieces - 2)
            return threads.load_two_numbers(self._factors[0], self._factor(row, first))
        count = 1 if self._group % (2 * g.piece) == 0 else 2
        places = [threads.least(piece + at, self._pieces - 1) for at in range(count)]
        return [threads.load_number(self._factors[0], self._factor(row, at)) for at in places]

    def _right(self, tile: _Tile, piece: Any) -> list[list[Any]]:  # noqa: ANN401 - a word
        """Returns the lane's column of the right operand: the pairs of x that meet each word of its piece, or zeros."""
        threads, g = self.threads, self.g
        half = self._line // MEMBERS
        is_own = (self._line % MEMBERS == self._member) & (piece < self._pieces)
        if not tile.has_both:
            is_own = is_own & (half == 0)
        row = threads.select(half == 0, *tile.rows_of_x)
        place = threads.select(is_own, row * (g.inner // 2) + piece * _WORDS_OF_X, g.kept + _GAP)
        return [threads.load_words(self._kept, place + at) for at in range(0, _WORDS_OF_X, WORDS)]

    def _scaled(
        self,
        total: Any,  # noqa: ANN401 - a number
        products: list[Any],
        tile: _Tile,
        scales: list[Any],
    ) -> Any:  # noqa: ANN401 - a number
        """Returns a total with the products of two pieces added, times their scales and the choice's weight."""
        threads, one = self.threads, self.threads.constant(1.0)
        if len(scales) < 2:
            products = [threads.multiply_add(products[0], one, products[1])]
        if tile.shares:
            if not scales:
                scales = [threads.load_number(self._factors[0], self._of_half(tile.rows))]
            share = self._of_half(tile.shares)
            scales = [threads.product(scale, share) for scale in scales]
        for number, scale in zip(products, scales or [one], strict=True):
            total = threads.multiply_add(number, scale, total)
        return total

    def _of_half(self, both: Any) -> Any:  # noqa: ANN401 - words
        """Returns what belongs to the half whose products the lane has."""
        return self.threads.select(self._member < 2, *both)

    def _factor(self, row: Any, piece: Any) -> Any:  # noqa: ANN401 - words
        """Returns the place of the scale and zero point of a piece of a row."""
        return row * self.g.scales + piece * self.g.piece // self._group


@dataclass(frozen=True)
class _Turn:
    """What a lane has loaded for a turn.

    Attributes:
        piece: its piece of the rows; it may be behind their end.
        codes: of each half, the words of the piece.
        zeros: of each half, the piece's zero point, or `None`.
        scales: of the two pieces whose products the lane has: two, one that both have, or none.
    """

    piece: Any
    codes: list[list[Any]]
    zeros: list[Any]
    scales: list[Any]


def _tile_of_choices(
    product: _Product,
    chosen: Ref,
    weights: Ref,
    row: Any,  # noqa: ANN401 - a word
    choice: int,
    first: Any,  # noqa: ANN401 - a word
) -> _Tile:
    """Returns the tile of two choices of a row, the second of which counts if there is one."""
    threads, g = product.threads, product.g
    last = g.count - 1
    pairs = [row * g.count + choice, row * g.count + min(choice + 1, last)]
    groups = [group_of(threads, chosen, pair, g) for pair in pairs]
    shares = tuple(threads.load_number(weights, pair) for pair in pairs)
    rows_of_x = (choice, choice + 1) if g.each else (0, 0)
    return _Tile(product.rows(groups, first), rows_of_x, shares, choice < last)


def _keep(threads: Threads, x: Ref, kept: Ref, first: Any, g: Geometry) -> None:  # noqa: ANN401 - a word
    """Stores the rows of x from the first one on in shared memory, in pairs, and zeros behind them; waits for all."""
    start, units = first * (g.inner // 2), g.kept // WORDS
    for begin in range(0, units, THREADS):
        unit = threads.number + begin
        words = threads.load_words(x, start + threads.least(unit, units - 1) * WORDS)
        threads.store_words(kept, unit * WORDS, paired(words), where=unit < units)
    zeros = [threads.lane * 0] * WORDS
    place = threads.number * WORDS + (g.kept + _GAP)
    threads.store_words(kept, place, zeros, where=threads.number < _WORDS_OF_X // WORDS)
    threads.sync()


def _store_sums(threads: Threads, sums: Ref, total: Any, g: Geometry) -> None:  # noqa: ANN401 - a number
    """Stores the sum of each row of the tile, or of the same row of both halves if they are choices; waits for all."""
    line, member = threads.lane // MEMBERS, threads.lane % MEMBERS
    count = MEMBERS if g.summed else MEMBERS // 2
    total = threads.total_of_lanes(total, count)
    place = threads.warp * (2 * LINES) + (member // count) * LINES + line
    threads.store(sums, place, total, where=member % count == 0)
    threads.sync()


def _of_warps(threads: Threads, sums: Ref, place: Any) -> Any:  # noqa: ANN401 - words
    """Returns the sum of the warps' numbers at a place, in their order."""
    total = threads.load(sums, place)
    for warp in range(1, WARPS):
        other = threads.load(sums, place + warp * (2 * LINES))
        total = threads.multiply_add(total, threads.constant(1.0), other)
    return total
