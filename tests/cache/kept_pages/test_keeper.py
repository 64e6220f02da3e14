"""Eviction of pages from the prefix index: which pages, in which order, and when none."""

import pytest

from jaxkv.errors import OutOfPages
from tests.cache.layouts import reserve
from tests.cache.prefix.scenes import ONE, Cache, full
from tests.cache.prefix.world import layout_of


def test_only_leaves_go_the_longest_unused_first():
    """Of A -> B -> {C, F} and A -> D -> E, used in the order F, C, E, three evictions keep A, D and E."""
    cache = Cache(ONE, {"group0": 9})
    for path in ("ABF", "ABC", "ADE"):
        cache.compute([ord(letter) for letter in path])
    assert cache.evict(3)
    assert [cache.hit([*map(ord, path), 0]) for path in ("ABF", "ABC", "ADE")] == [1, 1, 3]


def test_the_hottest_leaf_goes_before_a_cold_page_that_others_follow():
    """No page is kept without the one before it."""
    cache = Cache(ONE, {"group0": 9})
    cache.compute([1, 2, 3])
    cache.compute([1, 2, 3, 4])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 3, 4, 5]), cache.hit([1, 2, 3, 9])] == [3, 3]


def test_a_cached_child_of_a_pinned_page_goes_and_the_page_stays():
    cache = Cache(ONE, {"group0": 9})
    seq = cache.compute([1], stay=True)
    cache.compute([1, 2, 3])
    assert cache.evict(2)
    assert cache.hit([1, 2, 3]) == 1
    assert not cache.evict(1)
    cache.allocator.release(seq)
    assert cache.evict(1)


def test_too_few_to_evict_evicts_none():
    cache = Cache(layout_of((1, None), (1, None)), {"group0": 9, "group1": 9})
    cache.compute([1, 2, 3])
    assert not cache.index.reclaim({"group0": 2, "group1": 4}, {})
    assert cache.hit([1, 2, 3, 4]) == 3
    assert cache.index.stats.evictions == 0


def test_a_use_saves_a_page_from_eviction():
    cache = Cache(ONE, {"group0": 9})
    for first in (1, 2, 3):
        cache.compute([first, 5])
    seq, _ = cache.adopt([1, 5, 6])
    cache.allocator.release(seq)
    assert cache.evict(2)
    assert [cache.hit([first, 5, 6]) for first in (1, 2, 3)] == [2, 0, 2]


def test_a_page_counts_as_used_while_a_sequence_holds_it():
    cache = Cache(ONE, {"group0": 9})
    held = cache.compute([1], stay=True)
    cache.compute([2])
    cache.compute([3])
    assert cache.evict(1)
    cache.allocator.release(held)
    assert cache.evict(1)
    assert [cache.hit([first, 0]) for first in (1, 2, 3)] == [1, 0, 0]


def test_reserve_evicts_exactly_what_is_missing():
    cache = Cache(ONE, {"group0": 6})
    cache.compute([1, 2, 3, 4])
    seq, _ = cache.adopt([7, 8, 9])
    assert reserve(cache.allocator, seq, 3)[1] == {"group0": [4, 5, 3]}
    assert cache.hit([1, 2, 3, 4, 5]) == 3
    assert cache.index.stats.evictions == 1
    cache.check()


def test_a_reserve_that_fails_evicts_nothing_in_any_group():
    cache = Cache(layout_of((1, None), (1, None)), {"group0": 8, "group1": 4})
    cache.compute([1, 2, 3])
    seq, _ = cache.adopt([7, 8])
    with pytest.raises(
        OutOfPages, match="asked for 5 pages of 'group1' for sequence 1 but only 1 of 4 are free"
    ):
        cache.allocator.reserve(seq, 5)
    assert cache.hit([1, 2, 3, 4]) == 3
    assert cache.allocator.num_free("group0") == 5


def test_pages_that_a_match_pinned_are_not_counted_as_room():
    """The sequence matched four of six pages, so that two are left."""
    cache = Cache(ONE, {"group0": 6})
    cache.compute([1, 2, 3, 4])
    seq, match = cache.adopt([1, 2, 3, 4, 5])
    assert match.num_tokens == 4
    assert cache.allocator.num_reclaimable("group0") == 0
    with pytest.raises(OutOfPages):
        cache.allocator.reserve(seq, 7)
    assert reserve(cache.allocator, seq, 6)[1] == {"group0": [4, 5]}


def test_a_sequence_alone_is_never_kept_waiting_by_its_own_hit():
    """The copy of the last page has no room, so the index gives up its hold on the original."""
    cache = full(page_size=2, count=2)
    cache.compute([1, 2, 3, 4])
    seq, match = cache.adopt([1, 2, 3, 4])
    assert match.num_tokens == 3
    assert cache.allocator.reserve(seq, 4).copies == ()
    cache.check()
    assert cache.hit([1, 2, 3, 4, 5]) == 2


def test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it():
    """Two sequences computed the same first page; the one that is left holds its own copy of it."""
    cache = full(page_size=1, count=3)
    texts = ([1], [1, 2])
    seqs = [cache.adopt(text)[0] for text in texts]
    for seq, text in zip(seqs, texts, strict=True):
        cache.allocator.reserve(seq, len(text))
        cache.allocator.commit(seq, len(text))
        cache.index.publish(seq, text, cache.keys[seq], len(text))
    cache.allocator.release(seqs[0])
    assert cache.allocator.num_free("group0") == 0
    cache.allocator.reserve(seqs[1], 3)
    cache.check()
    assert cache.index.stats.evictions == 2


def test_of_pages_behind_a_page_in_use_only_as_many_go_as_are_missing():
    cache = full(page_size=1, count=6)
    seqs = [cache.adopt(text)[0] for text in ([1, 2], [1, 2, 3])]
    for seq, text in zip(seqs, ([1, 2], [1, 2, 3]), strict=True):
        cache.allocator.reserve(seq, len(text))
        cache.allocator.commit(seq, len(text))
        cache.index.publish(seq, text, cache.keys[seq], len(text))
    cache.allocator.release(seqs[0])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 3, 4]), cache.allocator.num_free("group0")] == [1, 2]


def test_no_more_entries_in_use_are_given_up_than_needed():
    """Two texts like the one above, both behind pages in use: one page is missing, so one text keeps its entries."""
    cache = full(page_size=1, count=6)
    for texts in (([1], [1, 2]), ([3], [3, 4])):
        seqs = [cache.adopt(text)[0] for text in texts]
        for seq, text in zip(seqs, texts, strict=True):
            cache.allocator.reserve(seq, len(text))
            cache.allocator.commit(seq, len(text))
            cache.index.publish(seq, text, cache.keys[seq], len(text))
        cache.allocator.release(seqs[0])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 0]), cache.hit([3, 4, 0])] == [0, 2]


def test_a_page_computed_again_counts_as_used():
    """A sequence that publishes what another did before it: the first page stays, and is no longer the oldest."""
    cache = Cache(ONE, {"group0": 9})
    twin, _ = cache.adopt([1, 2])
    cache.compute([1])
    cache.compute([5])
    cache.allocator.reserve(twin, 1)
    cache.allocator.commit(twin, 1)
    assert cache.index.publish(twin, [1], cache.keys[twin], 1) == 0
    cache.allocator.release(twin)
    assert cache.evict(1)
    assert [cache.hit([1, 0]), cache.hit([5, 0])] == [1, 0]


def test_pages_go_in_order_after_any_number_of_uses():
    cache = Cache(ONE, {"group0": 9})
    for first in range(8):
        cache.compute([first])
    for use in range(300):
        seq, _ = cache.adopt([use * 5 % 8, 9])
        cache.allocator.release(seq)
        cache.index.check()
    assert cache.evict(5)
    # The last three uses were 295, 300 and 305 modulo 8, of 297, 298 and 299 times five.
    assert [first for first in range(8) if cache.hit([first, 0])] == sorted(
        [1485 % 8, 1490 % 8, 1495 % 8]
    )


def test_the_queue_of_candidates_does_not_grow_with_use():
    """The memory of the host is bounded."""
    cache = Cache(layout_of((1, None), (1, 3)), {"group0": 9, "group1": 9})
    for turn in range(500):
        cache.compute([turn % 3, 1, 2])
    assert all(len(tree._queue) <= 4 * len(tree) + 64 for tree in cache.index._trees.values())
