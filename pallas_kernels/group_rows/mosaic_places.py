"""Code of single threads that finds the rows of a tile of tokens: counts of all pairs, then one token after the other.

Terms: a *pair* is a token and a group that it chooses. A *tile* is adjacent tokens, whose rows a block finds.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from pallas_kernels.mosaic.per_thread import THREADS, Threads
from pallas_kernels.mosaic.private_types import Ref

_IN_FLIGHT = 32
"""Most choices that a thread loads before it counts them."""


@dataclass(frozen=True)
class Plan:
    """The division of tokens among blocks.

    Attributes:
        tokens: number of tokens.
        count: groups that each chooses.
        groups: number of groups.
        tile: tokens of a tile; the last one may have fewer.
        shares: blocks of each tile, which copy rows of different choices.
    """

    tokens: int
    count: int
    groups: int
    tile: int
    shares: int

    @classmethod
    def of(cls, tokens: int, count: int, groups: int, blocks: int) -> "Plan":
        """Returns the plan for at most `blocks` blocks: the smallest tiles, then the most shares."""
        tile = ceil(tokens / blocks)
        shares = min(count, blocks // ceil(tokens / tile))
        return cls(tokens, count, groups, tile, shares)

    @property
    def blocks(self) -> int:
        """Number of blocks; those of a tile are adjacent."""
        return ceil(self.tokens / self.tile) * self.shares

    @property
    def pairs(self) -> int:
        """Number of pairs, which is that of rows."""
        return self.tokens * self.count

    @property
    def counters(self) -> int:
        """Number of counters: one for each group, and one for each thread that may have no pair."""
        return self.groups + THREADS

    @property
    def scratch(self) -> tuple[int, int]:
        """Sizes of `counts` and `rows`, whole numbers per thread."""
        return _whole(2 * self.counters), _whole(self.tile * self.count + THREADS)


def find_starts(
    threads: Threads,
    chosen: Ref,
    sizes: Ref,
    counts: Ref,
    rows: Ref,
    sums: Ref,
    first: Any,  # noqa: ANN401 - a word
    share: Any,  # noqa: ANN401 - a word
    *,
    plan: Plan,
) -> None:
    """Finds the row of each group's first pair in the tile; the first block writes the sizes of the groups.

    Args:
        threads: the block's threads.
        chosen: the group of each pair, in the order of tokens.
        sizes: rows of each group, written.
        counts: set to the row of each group's next pair. Before that it has two parts, each of `plan.counters`: numbers
            of pairs before the tile, and of the others.
        rows: set to the group of each pair of the tile.
        sums: a number per warp.
        first: the tile's first token.
        share: the block's number among those of the tile.
        plan: the division of tokens.
    """
    of_tile = _each(threads, plan.tile * plan.count)
    groups = [_group(threads, chosen, pair + first * plan.count, plan) for pair in of_tile]
    for place in _each(threads, plan.scratch[0]):
        threads.store(counts, place, 0)
    threads.sync()
    _count_pairs(threads, chosen, counts, first, plan)
    for pair, group in zip(of_tile, groups, strict=True):
        threads.store(rows, pair, group)
    threads.sync()
    _add_up(threads, sizes, counts, sums, (first == 0) & (share == 0), plan)
    threads.sync()


def place_token(
    threads: Threads,
    row_groups: Ref,
    places: Ref,
    counts: Ref,
    rows: Ref,
    first: Any,  # noqa: ANN401 - a word
    share: Any,  # noqa: ANN401 - a word
    turn: Any,  # noqa: ANN401 - a word
    *,
    plan: Plan,
) -> None:
    """Finds the rows of a token's pairs, after those of earlier tokens; the tile's first block writes them.

    Args:
        threads: the block's threads.
        row_groups: the group of each row, written.
        places: the row of each pair, written.
        counts: the row of each group's next pair; those of the token's groups are increased.
        rows: the groups of the token's pairs, which their rows replace.
        first: as of `find_starts`.
        share: likewise.
        turn: the token's number in the tile.
        plan: as of `find_starts`.
    """
    for choice in _each(threads, plan.count):
        is_pair, pair = choice < plan.count, turn * plan.count + choice
        group = threads.load(rows, pair)
        counter = threads.select(is_pair, group, threads.number + plan.groups)
        row = threads.load(counts, counter)
        threads.store(counts, counter, row + 1, where=is_pair)
        threads.store(rows, pair, row, where=is_pair)
        writes = is_pair & (share == 0)
        threads.store(places, first * plan.count + pair, row, where=writes)
        threads.store(row_groups, row, group, where=writes)
    threads.sync()


def _count_pairs(
    threads: Threads,
    chosen: Ref,
    counts: Ref,
    first: Any,  # noqa: ANN401 - a word
    plan: Plan,
) -> None:
    """Counts the pairs of each group, those before the tile apart; the arguments are those of `find_starts`."""
    turns = ceil(plan.pairs / (THREADS * _IN_FLIGHT))
    batch = ceil(plan.pairs / turns)

    def count_batch(turn: Any, words: list[Any]) -> list[Any]:  # noqa: ANN401 - a word
        pairs = [pair + turn * _whole(batch) for pair in _each(threads, batch)]
        groups = [_group(threads, chosen, pair, plan) for pair in pairs]
        for pair, group in zip(pairs, groups, strict=True):
            # Threads without a pair do not wait for one another at the same counter.
            counter = threads.select(pair < plan.pairs, group, threads.number + plan.groups)
            is_before = pair < first * plan.count
            threads.add(counts, threads.select(is_before, counter, counter + plan.counters), 1)
        return words

    threads.fold(turns, [], count_batch)


def _add_up(
    threads: Threads,
    sizes: Ref,
    counts: Ref,
    sums: Ref,
    writes: Any,  # noqa: ANN401 - a condition
    plan: Plan,
) -> None:
    """Sets `counts` to the row of each group's next pair; a thread has adjacent groups.

    The arguments are those of `find_starts`, and whether the block writes the sizes.
    """
    adjacent = ceil(plan.groups / THREADS)
    found, total = [], threads.number * 0
    for part in range(adjacent):
        group = threads.number * adjacent + part
        place = threads.least(group, plan.groups - 1)
        before = threads.load(counts, place)
        size = before + threads.load(counts, place + plan.counters)
        size = threads.select(group < plan.groups, size, 0)
        found.append((group, before, size))
        total = total + size
    start = threads.running_sum(total, sums) - total
    for group, before, size in found:
        is_group = group < plan.groups
        threads.store(counts, group, start + before, where=is_group)
        threads.store(sizes, group, size, where=writes & is_group)
        start = start + size


def _group(threads: Threads, chosen: Ref, pair: Any, plan: Plan) -> Any:  # noqa: ANN401 - words
    """Returns the group of a pair, of the last one for a pair that is not there."""
    group = threads.load(chosen, threads.least(pair, plan.pairs - 1))
    # A group that is not there would be counted out of bounds.
    return threads.most(threads.least(group, plan.groups - 1), 0)


def _each(threads: Threads, size: int) -> list[Any]:
    """Returns the thread's numbers below `_whole(size)`, of which adjacent threads have adjacent ones."""
    return [threads.number + start for start in range(0, size, THREADS)]


def _whole(size: int) -> int:
    """Returns the next multiple of the number of threads, for an array that all threads store to in step."""
    return ceil(size / THREADS) * THREADS
