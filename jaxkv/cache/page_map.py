"""The page map: the holder of each page and state of a cache, as runs of neighbours. It changes nothing."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jaxkv.cache.kept_pages.lookup import HitRule
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import CacheLayout, Group

KINDS = ("free", "used", "shared", "cached", "checkpoint")
"""What holds a page or state; runs name these by their index.

free: nothing. used: sequences. shared: sequences and the prefix cache. cached: the prefix cache alone. checkpoint: a
checkpoint alone; of a paged group, the page with its last tokens.
"""

FREE, USED, SHARED, CACHED, CHECKPOINT = range(len(KINDS))

MOST_CELLS = 16_384
"""Most cells of a map. In a larger pool several neighbours are one cell."""


@dataclass(frozen=True, kw_only=True)
class GroupMap:
    """The holders of one group's pages or states, in the order of their ids.

    The ids are cut into cells of `cell` neighbours; the last cell may be shorter. A cell of several ids has the holder
    that most of them have. Equal neighbouring cells are one run; the last four attributes have one number per run.

    Attributes:
        name: group name.
        unit: "page" or "state".
        first: the first id.
        total: number of ids.
        cell: ids per cell, a power of two.
        counts: number of ids of each of `KINDS`, exact for any `cell`.
        kinds: index of `KINDS`.
        lengths: number of cells.
        holders: number of the sequence if a sequence holds it (the lowest one of several); position in the page table
            of a cached page, which grows by `cell` with each cell of the run; tokens of a checkpoint; 0 if free.
        sharers: number of sequences that hold it.
    """

    name: str
    unit: str
    first: int
    total: int
    cell: int
    counts: tuple[int, ...]
    kinds: list[int]
    lengths: list[int]
    holders: list[int]
    sharers: list[int]


@dataclass(frozen=True, kw_only=True)
class TreeSummary:
    """The cached pages of one group as a tree.

    Attributes:
        name: group name.
        page_size: tokens per page.
        pages: number of cached pages.
        ends: cached pages that no cached page follows: the number of distinct cached texts.
        deepest: pages from the first one to the deepest cached one.
    """

    name: str
    page_size: int
    pages: int
    ends: int
    deepest: int


def page_map(
    layout: CacheLayout,
    allocator: PageAllocator,
    index: PrefixIndex | None,
    *,
    most_cells: int = MOST_CELLS,
) -> tuple[GroupMap, ...]:
    """Returns the map of each group. It changes nothing.

    Args:
        layout: the groups.
        allocator: their pages and states.
        index: the prefix cache; `None` if it is off.
        most_cells: most cells of a map.
    """
    return tuple(_group_map(group, allocator, index, most_cells) for group in layout.groups)


def tree_summaries(index: PrefixIndex) -> tuple[TreeSummary, ...]:
    """Returns a summary of the cached pages of each paged group."""
    pages = index.kept_pages
    return tuple(_summary(name, rule, pages.trees[name]) for name, rule in pages.rules.items())


def _summary(name: str, rule: HitRule, tree: PrefixTree) -> TreeSummary:
    if rule.window is None:
        ends = [node.children for node in tree].count(0)
    else:
        followed = {node.key.parent for node in tree}
        ends = sum(node.key.digest not in followed for node in tree)
    deepest = max((node.index for node in tree), default=-1) + 1
    return TreeSummary(
        name=name, page_size=rule.page_size, pages=len(tree), ends=ends, deepest=deepest
    )


def runs_of(
    name: str,
    unit: str,
    first: int,
    columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    most_cells: int = MOST_CELLS,
) -> GroupMap:
    """Returns a map from the kind, holder and number of sharers of each id.

    Args:
        name: group name.
        unit: "page" or "state".
        first: the first id.
        columns: kinds, holders and sharers, one number per id.
        most_cells: most cells of the map.
    """
    kinds, holders, sharers = columns
    total, cell = len(kinds), 1
    while total > cell * most_cells:
        cell *= 2
    counts = tuple(np.bincount(kinds, minlength=len(KINDS)).tolist())
    chosen = np.arange(total) if cell == 1 else _most_common(kinds, cell)
    kinds, holders, sharers = kinds[chosen], holders[chosen], sharers[chosen]
    # Along a run of cached pages the position grows with the id, so their difference is constant.
    places = np.arange(len(chosen)) * cell
    keys = np.where(kinds == CACHED, holders - places, holders)
    ends = [np.diff(column) != 0 for column in (kinds, keys, sharers)]
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, total), bool), np.any(ends, axis=0)]))
    return GroupMap(
        name=name,
        unit=unit,
        first=first,
        total=total,
        cell=cell,
        counts=counts,
        kinds=kinds[starts].tolist(),
        lengths=np.diff(starts, append=len(chosen)).tolist(),
        holders=holders[starts].tolist(),
        sharers=sharers[starts].tolist(),
    )


def _group_map(
    group: Group, allocator: PageAllocator, index: PrefixIndex | None, most_cells: int
) -> GroupMap:
    pool = allocator.pool(group.name)
    references = np.array(pool.counts(), np.int64)
    total = len(references)
    holders = np.zeros(total, np.int64)
    is_kept = np.zeros(total, bool)
    is_kept[_ints(pool.kept)] = True
    kinds = np.where(is_kept, CACHED, FREE)
    if index is not None:
        _mark_cached(group, index, kinds, holders)
    # A shared page shows its lowest number, which is written last.
    for seq in sorted(allocator.open_sequences, reverse=True):
        holders[_ints(allocator.held(seq).ids(group.name))] = seq
    sharers = references - is_kept
    kinds = np.where(sharers > 0, np.where(is_kept, SHARED, USED), kinds)
    first = total - pool.num_total
    columns = kinds[first:], holders[first:], sharers[first:]
    return runs_of(group.name, group.unit, first, columns, most_cells)


def _mark_cached(group: Group, index: PrefixIndex, kinds: np.ndarray, holders: np.ndarray) -> None:
    """Sets the positions of a group's cached pages, and the kind and length of its checkpoints."""
    tree = index.kept_pages.trees.get(group.name)
    if tree is not None:
        holders[_ints([node.page for node in tree])] = _ints([node.index for node in tree])
    units, lengths = [], []
    for one in index.kept_states.kept:
        for held in (one.states, one.tails):
            if group.name in held:
                units.append(held[group.name])
                lengths.append(one.length)
    holders[_ints(units)] = _ints(lengths)
    kinds[_ints(units)] = CHECKPOINT


def _ints(values: Collection[int]) -> np.ndarray:
    return np.fromiter(values, np.int64, len(values))


def _most_common(kinds: np.ndarray, cell: int) -> np.ndarray:
    """Returns, for each cell, the first id of the kind that most of its ids have; of a tie, the later of `KINDS`."""
    rows = -(-len(kinds) // cell)
    padded = np.full(rows * cell, len(KINDS), np.int64)
    padded[: len(kinds)] = kinds
    table = padded.reshape(rows, cell)
    votes = np.stack([(table == kind).sum(axis=1) for kind in range(len(KINDS))])
    winners = len(KINDS) - 1 - np.argmax(votes[::-1], axis=0)
    return np.arange(rows) * cell + np.argmax(table == winners[:, None], axis=1)
