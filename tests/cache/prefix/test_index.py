"""The prefix index after sequences end or fail and caches are lost; its statistics and explanations."""

import pytest

from jaxkv.cache.prefix.index import PrefixIndex
from tests.cache.prefix.scenes import ONE, Cache, full
from tests.cache.prefix.world import layout_of


def test_a_failed_sequence_takes_its_pages_and_what_follows_them_with_it():
    """No later sequence begins from its values, which are not finite."""
    cache = Cache(ONE, {"group0": 9})
    bad = cache.compute([1, 2], stay=True)
    cache.compute([1, 2, 3])
    cache.compute([7, 8])
    assert cache.index.withdraw(bad) == 3
    cache.allocator.release(bad)
    cache.check()
    assert [cache.hit([1, 2, 3, 4]), cache.hit([7, 8, 9])] == [0, 2]


def test_a_lost_cache_loses_every_page_and_every_sequence():
    cache = full(page_size=2)
    seq = cache.compute([1, 2, 3, 4], stay=True)
    cache.allocator.release(seq)
    cache.index.clear()
    cache.check()
    assert cache.allocator.num_free("group0") == 12
    assert cache.hit([1, 2, 3, 4]) == 0
    assert cache.index._trees["group0"]._queue == []


def test_a_sequence_that_began_before_a_clear_publishes_nothing():
    """Weights may have been swapped; the next adoption of the same text publishes again."""
    cache = full(page_size=2)
    text = [1, 2, 3, 4]
    seq = cache.compute(text, stay=True)
    cache.index.clear()
    cache.check()
    cache.allocator.reserve(seq, 6)
    cache.allocator.commit(seq, 6)
    assert cache.index.publish(seq, [*text, 5, 6], cache.keys[seq], 6) == 0
    cache.allocator.release(seq)
    cache.index.adopt(8, text, cache.keys[seq])
    cache.allocator.reserve(8, 4)
    cache.allocator.commit(8, 4)
    assert cache.index.publish(8, text, cache.keys[seq], 4) == 2


def test_an_allocator_has_one_index():
    cache = full()
    with pytest.raises(ValueError, match="has a prefix owner already"):
        PrefixIndex(layout_of((16, None)), cache.allocator)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache, tree: tree._nodes.pop(next(iter(tree._nodes))), "corrupt"),
        (lambda cache, tree: tree._queue.clear(), "corrupt"),
        (lambda cache, tree: setattr(next(iter(tree)), "children", 7), "corrupt"),
        (lambda cache, tree: setattr(next(iter(tree)), "page", 1), "corrupt"),
        (
            lambda cache, tree: setattr(next(iter(tree)), "page", 9),
            r"has the pages \[9\] without a reference",
        ),
        (
            lambda cache, tree: cache.allocator.pool("group0").release_kept(1),
            r"the pages \[1\] without a reference",
        ),
        (
            lambda cache, tree: cache.allocator.pool("group0").keep(2),
            r"references to \[2\] without an entry",
        ),
    ],
)
def test_check_finds_contradictions(damage, message):
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4, 5], stay=True)
    damage(cache, cache.index._trees["group0"])
    with pytest.raises(ValueError, match=message):
        cache.index.check()


def test_the_allocator_counts_the_reference_of_the_index():
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4])
    cache.adopt([1, 2, 3, 4, 5])
    cache.allocator.pool("group0")._references[1] += 1
    with pytest.raises(
        ValueError, match=r"the actual references of these pages differ: \{1: \(3, 2\)\}"
    ):
        cache.allocator.check()
    cache.allocator.pool("group0")._references[1] -= 1
    cache.allocator.pool("group0")._num_idle += 1
    with pytest.raises(ValueError, match=r"only the prefix owner holds \[\], counted as 1"):
        cache.allocator.check()


def test_counts_are_exact_on_a_scripted_trace():
    """A sequence that was adopted and given up for want of room does not count."""
    cache = full(page_size=4, count=4)
    cache.compute(list(range(10)))  # Computes 10.
    cache.compute(list(range(10)))  # Reuses 8, computes 2.
    cache.compute([*range(4), 9, 9])  # Reuses 4, computes 2.
    cache.compute([0, 1, 2])  # Computes 3, and fills no page.
    seq, _ = cache.adopt(list(range(30)))
    cache.allocator.release(seq)
    cache.compute(
        list(range(50, 64))
    )  # Computes 14; all four pages are needed, two of them are kept.
    stats = cache.index.stats
    assert (stats.hits, stats.misses) == (2, 3)
    assert (stats.tokens_reused, stats.tokens_computed) == (12, 31)
    assert stats.evictions == 2
    stats.hits = 99
    assert cache.index.stats.hits == 2


def test_explain_says_what_hit_and_what_missed_and_why():
    cache = Cache(layout_of((4, None), (2, 4)), {"group0": 9, "group1": 9})
    text = list(range(10))
    cache.compute(text)
    told = cache.index.explain([*text, 1])
    assert (told.num_tokens, told.num_reused) == (11, 8)
    assert "group 'group0': page 2 is not full" in told.why
    assert [(part.pages_kept, part.longest) for part in told.groups] == [(2, 8), (5, 10)]
    assert cache.index.explain(text[:8]).why == "the last token is always computed"
    never = cache.index.explain([5] * 9)
    assert "page 0 was never computed for these tokens and this salt" in never.why
    cache.evict(1, "group0")
    tick = cache.index.explain(text).tick
    assert f"page 1 was evicted at tick {tick}" in cache.index.explain(text).why
    assert str(cache.index.explain(text)).splitlines() == [
        f"4 of 10 tokens are in the cache, 6 are computed: group 'group0': page 1 was evicted at tick {tick}",
        f"  group0: 1 of 2 full pages of 4 tokens are cached, alone allows 4 tokens; page 1 was evicted at tick {tick}",
        "  group1: 5 of 5 full pages of 2 tokens are cached, alone allows 9 tokens",
    ]


def test_explain_says_which_group_lacks_what_another_has():
    cache = Cache(layout_of((2, None), (2, 4)), {"group0": 9, "group1": 9})
    cache.compute(list(range(8)))
    cache.evict(4, "group1")
    told = cache.index.explain(list(range(9)))
    assert told.num_reused == 0
    assert told.why.startswith("group 'group1': page 0 was evicted")
    assert [part.longest for part in told.groups] == [8, 0]


def test_evictions_are_remembered_within_bounds(monkeypatch):
    """The memory of the host is bounded."""
    monkeypatch.setattr("jaxkv.cache.kept_pages.tree._REMEMBERED", 2)
    cache = Cache(ONE, {"group0": 9})
    for first in (1, 2, 3):
        cache.compute([first])
    cache.evict(3)
    why = [cache.index.explain([first, 0]).why for first in (1, 2, 3)]
    assert ["was evicted" in text for text in why] == [False, True, True]
    assert "or dropped long ago" in why[0]


def test_publishing_what_fills_no_page_does_nothing():
    cache = full(page_size=4)
    seq = cache.compute(list(range(4)), stay=True)
    tick = cache.index.explain([1]).tick
    cache.allocator.reserve(seq, 7)
    cache.allocator.commit(seq, 7)
    assert cache.index.publish(seq, list(range(7)), cache.keys[seq], 7) == 0
    assert cache.index.explain([1]).tick == tick


def test_explain_changes_nothing():
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4])
    before = cache.index.stats, cache.index._tick, list(cache.index._trees["group0"]._queue)
    cache.index.explain([1, 2, 3, 4])
    cache.index.match([1, 2, 3, 4], cache.index.keys())
    assert (cache.index.stats, cache.index._tick, cache.index._trees["group0"]._queue) == before


def test_a_text_of_no_or_one_token_has_nothing_to_reuse():
    cache = full(page_size=1)
    cache.compute([1])
    assert [cache.hit([]), cache.hit([1])] == [0, 0]
    assert str(cache.index.explain([])).startswith("0 of 0 tokens")
