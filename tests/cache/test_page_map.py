"""The page map names the holder of every page and state, against the books of random programs."""

import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.page_map import (
    CACHED,
    CHECKPOINT,
    FREE,
    KINDS,
    SHARED,
    USED,
    page_map,
    runs_of,
    tree_summaries,
)
from jaxkv.cache.prefix.index import PrefixIndex
from tests.cache.kept_states.hybrid_world import hybrid_of
from tests.cache.kept_states.test_keeper_machine import HybridMachine
from tests.cache.prefix.test_index_machine import with_settings
from tests.cache.prefix.world import layout_of


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no device arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def unrolled(group):
    """Returns id -> (kind, holder, sharers) of an exact map."""
    assert group.cell == 1
    found, unit = {}, group.first
    for kind, length, holder, sharers in zip(
        group.kinds, group.lengths, group.holders, group.sharers, strict=True
    ):
        for step in range(length):
            found[unit] = (kind, holder + step * (kind == CACHED), sharers)
            unit += 1
    return found


def holders_in_the_books(allocator, index, name):
    """The same, asked unit by unit."""
    pool = allocator.pool(name)
    places = {node.page: node.index for node in index.kept_pages.trees.get(name, ())}
    lengths = {}
    for one in index.kept_states.kept:
        for units in (one.states, one.tails):
            if name in units:
                lengths[units[name]] = one.length
    first = pool.num_total - len(pool.counts())
    found = {}
    for unit in range(-first, len(pool.counts())):
        seqs = [seq for seq in allocator.open_sequences if unit in allocator.held(seq).ids(name)]
        kept = unit in places or unit in lengths
        if seqs:
            found[unit] = (SHARED if kept else USED, min(seqs), len(seqs))
        elif unit in lengths:
            found[unit] = (CHECKPOINT, lengths[unit], 0)
        elif unit in places:
            found[unit] = (CACHED, places[unit], 0)
        else:
            found[unit] = (FREE, 0, 0)
    return found


class MappedMachine(HybridMachine):
    """After each operation, the map is compared with the books."""

    @invariant()
    def every_unit_has_its_holder_exactly_once(self):
        allocator, index = self.world.allocator, self.world.index
        for group in page_map(self.world.layout, allocator, index):
            found = unrolled(group)
            assert found == holders_in_the_books(allocator, index, group.name)
            assert len(found) == group.total == sum(group.counts)
            free, used, shared, cached, checkpoint = group.counts
            assert free == allocator.num_free(group.name)
            assert cached + checkpoint == allocator.num_reclaimable(group.name)
            assert used + shared == group.total - free - cached - checkpoint
            assert group.first == (group.unit == "state")


def machine_of(name):
    machine = type(f"Mapped_{name}", (MappedMachine,), {"name": name})
    return with_settings(machine, most=6, steps=25)


TestOne = machine_of("one")
TestSeveral = machine_of("several")


COLUMNS = st.lists(
    st.tuples(st.sampled_from([FREE, USED, CACHED]), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)


@given(COLUMNS, st.integers(1, 12))
def test_a_large_pool_is_cut_into_few_cells_whose_counts_stay_exact(rows, most):
    columns = tuple(np.array(rows, np.int64).T)
    group = runs_of("group", "page", 0, columns, most)
    cells = -(-len(rows) // group.cell)
    assert sum(group.lengths) == cells <= most
    assert group.cell == 1 or -(-len(rows) // (group.cell // 2)) > most
    assert list(group.counts) == [sum(row[0] == kind for row in rows) for kind in range(len(KINDS))]
    kinds = np.repeat(group.kinds, group.lengths).tolist()
    for at, kind in enumerate(kinds):
        inside = [row[0] for row in rows[at * group.cell : (at + 1) * group.cell]]
        assert inside.count(kind) == max(map(inside.count, inside))


def test_cached_pages_in_order_are_one_run():
    kinds = np.full(6, CACHED)
    group = runs_of("group", "page", 0, (kinds, np.array([3, 4, 5, 0, 1, 2]), np.zeros(6, int)))
    assert (group.lengths, group.holders) == ([3, 3], [3, 0])


def test_a_cache_without_a_prefix_index_is_free_or_used():
    layout = layout_of((2, None))
    allocator = PageAllocator(layout, {"group0": 5})
    allocator.open(7)
    allocator.reserve(7, 3)
    (group,) = page_map(layout, allocator, None)
    assert (group.kinds, group.lengths, group.holders) == ([USED, FREE], [2, 3], [7, 0])


def test_a_tree_summary_counts_texts_and_depth():
    layout = layout_of((2, None))
    allocator = PageAllocator(layout, {"group0": 9})
    index = PrefixIndex(layout, allocator, secret=b"tests")
    for seq, text in enumerate(([1, 1, 2, 2, 3, 3], [1, 1, 4, 4])):
        keys = index.keys()
        index.adopt(seq, text, keys)
        allocator.reserve(seq, len(text))
        allocator.commit(seq, len(text))
        index.publish(seq, text, keys, len(text))
    (summary,) = tree_summaries(index)
    assert (summary.page_size, summary.pages, summary.ends, summary.deepest) == (2, 4, 2, 3)


def test_a_checkpoint_holds_its_states_and_the_page_with_its_last_tokens():
    layout = hybrid_of((4, None))
    allocator = PageAllocator(layout, {"group0": 5, "state0": 5, "sampling": 3})
    index = PrefixIndex(layout, allocator, secret=b"tests", checkpoints=2)
    text = [1, 2, 3, 4, 5, 6]
    keys = index.keys()
    index.adopt(3, text, keys)
    allocator.reserve(3, len(text))
    allocator.commit(3, len(text))
    index.publish(3, text, keys, len(text))
    [copy] = index.store_checkpoint(3, text, keys, len(text), current=True)
    maps = {one.name: unrolled(one) for one in page_map(layout, allocator, index)}
    assert maps["group0"][copy.target] == (CHECKPOINT, 6, 0)
    assert [one[0] for one in maps["state0"].values()].count(SHARED) == 1
    allocator.release(3)
    maps = {one.name: unrolled(one) for one in page_map(layout, allocator, index)}
    assert maps["group0"][copy.target] == (CHECKPOINT, 6, 0)
    assert sorted(maps["group0"].values())[-2:] == [(CACHED, 0, 0), (CHECKPOINT, 6, 0)]
    assert (CHECKPOINT, 6, 0) in maps["state0"].values()
