"""Prefix hits in caches with several groups, sliding windows and recurrent states."""

import itertools

import pytest

from jaxkv.cache.kept_pages.keys import page_key
from jaxkv.cache.kept_pages.lookup import HitRule, Lookup, longest
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.page_allocator import Match, PageCopy
from tests.cache.layouts import hybrid
from tests.cache.prefix.scenes import Cache, full
from tests.cache.prefix.world import MIXED, layout_of


def test_a_hit_is_as_long_as_every_group_accepts():
    cache = Cache(layout_of((4, None), (3, None)), {"group0": 9, "group1": 9})
    cache.compute(list(range(12)))
    assert cache.hit(range(13)) == 12
    assert cache.evict(1, "group1")
    assert cache.hit(range(13)) == 9
    assert cache.evict(1, "group0")
    assert cache.hit(range(13)) == 8


def test_a_hit_that_ends_inside_a_page_shares_it_and_copies_it_when_written():
    """Group 1 ends a hit at token 9, in the third page of group 0."""
    cache = Cache(layout_of((4, None), (3, None)), {"group0": 9, "group1": 9})
    cache.compute(list(range(12)))
    cache.evict(1, "group1")
    seq, match = cache.adopt(list(range(13)))
    assert match.pages == {"group0": (0, 1, 2), "group1": (0, 1, 2)}
    assert cache.allocator.reserve(seq, 10).copies == (PageCopy("group0", 2, 3),)
    cache.check()


def windowed():
    """A full group and a window of 4 tokens in pages of 2; the window's first two pages are gone."""
    cache = Cache(layout_of((2, None), (2, 4)), {"group0": 9, "group1": 9})
    cache.compute(list(range(10)))
    assert cache.evict(2, "group1")
    return cache


def test_a_window_needs_only_what_the_next_token_sees():
    cache = windowed()
    assert cache.hit(range(11)) == 10
    # The token after six would see tokens 3 to 5, and token 3 is in the second page.
    assert cache.hit([*range(6), 99]) == 0
    assert cache.hit([*range(8), 99]) == 8
    assert cache.evict(1, "group1")
    assert cache.hit([*range(8), 99]) == 0
    assert cache.hit(range(11)) == 10


def test_places_before_the_window_hold_no_page():
    cache = windowed()
    seq, match = cache.adopt(list(range(11)))
    assert match.unneeded == {"group0": 0, "group1": 3}
    assert cache.allocator.pages(seq, "group1") == (0, 0, 0, 3, 4)
    cache.allocator.fork(seq, 9)
    cache.check()
    for one in (seq, 9):
        cache.allocator.reserve(one, 13)
        cache.allocator.commit(one, 13)
        cache.check()
    text = list(range(13))
    assert cache.index.publish(seq, text, cache.keys[seq], 13) == 2
    cache.check()
    cache.allocator.release(9)
    cache.allocator.release(seq)
    assert cache.hit([*text, 0]) == 12


def test_a_place_without_a_page_is_never_published():
    """The hit ends inside a page, so that the end of the last full page lies before what the sequence holds."""
    cache = Cache(layout_of((1, None), (4, 2)), {"group0": 30, "group1": 9})
    cache.compute(list(range(12)))
    assert cache.evict(3, "group0")
    assert cache.evict(2, "group1")
    seq, match = cache.adopt(list(range(13)))
    assert (match.num_tokens, match.unneeded) == (9, {"group0": 0, "group1": 2})
    cache.allocator.reserve(seq, 10)
    cache.allocator.commit(seq, 10)
    assert cache.index.publish(seq, list(range(13)), cache.keys[seq], 10) == 1
    cache.check()


def test_pages_before_every_window_go_first():
    """If the ends of windows went first, no hit would be left."""
    cache = Cache(layout_of((1, 3)), {"group0": 20})
    for seq_length in (4, 8, 8):
        cache.compute(list(range(seq_length)))
    assert cache.evict(4)
    assert cache.hit(range(9)) == 8


def test_pages_that_the_next_token_sees_are_kept_again():
    """Another sequence's page in the middle of the window was evicted; this one has its own."""
    cache = Cache(layout_of((1, 4)), {"group0": 12})
    mine, _ = cache.adopt([1, 2, 3, 4, 5])
    cache.compute([1, 2, 3])
    cache.allocator.reserve(mine, 5)
    cache.allocator.commit(mine, 5)
    text = [1, 2, 3, 4, 5]
    assert cache.index.publish(mine, text, cache.keys[mine], 4) == 1
    assert cache.evict(3)
    assert cache.index.publish(mine, text, cache.keys[mine], 5) == 2
    assert cache.hit([*text, 6]) == 5


def test_what_a_sequence_saw_last_counts_as_used_when_it_publishes():
    cache = Cache(layout_of((1, 3)), {"group0": 12})
    text = [1, 2, 3, 4]
    seq = cache.compute(text[:3], stay=True)
    cache.compute([9])
    cache.allocator.reserve(seq, 4)
    cache.allocator.commit(seq, 4)
    assert cache.index.publish(seq, text, cache.keys[seq], 4) == 1
    cache.allocator.release(seq)
    assert cache.evict(3)
    assert [cache.hit([*text, 0]), cache.hit([9, 0])] == [4, 0]


def lookup_of(rule, mask):
    """What a group keeps of twelve tokens: the pages whose bits are set."""
    keys = [page_key(b"", bytes([index])) for index in range(12 // rule.page_size)]
    tree = PrefixTree(leaf_only=False)
    for index, key in enumerate(keys):
        if mask >> index & 1:
            tree.add(key, index, index, 0)
    return Lookup("", rule, tree, keys)


def test_the_longest_hit_is_the_longest_for_every_set_of_kept_pages():
    """Exhaustive: three groups of different pages and windows over twelve tokens, every set of kept pages and limit."""
    rules = (HitRule(4, None), HitRule(3, 5), HitRule(6, 2))
    for masks in itertools.product(range(8), range(16), range(4)):
        lookups = list(map(lookup_of, rules, masks))
        accepted = [
            length
            for length in range(1, 13)
            if all(
                mask >> position // rule.page_size & 1
                for rule, mask in zip(rules, masks, strict=True)
                for position in range(max(0, length - (rule.window or 99) + 1), length)
            )
        ]
        for limit in range(13):
            assert longest(lookups, limit) == max((n for n in accepted if n <= limit), default=0)


def test_a_window_of_one_token_still_needs_a_page_to_show():
    cache = Cache(layout_of((2, 1)), {"group0": 9})
    assert cache.hit(range(5)) == 0
    cache.compute(list(range(4)))
    assert cache.hit(range(5)) == 4


def test_recurrent_groups_skip_nothing_without_a_checkpoint():
    """Equal keys are no reason to skip the tokens of a state."""
    cache = Cache(hybrid(), {"gqa": 6, "odd": 12, "mamba2": 5, "sampling": 5})
    cache.compute(list(range(9)))
    match = cache.index.match(list(range(9)), cache.index.keys())
    assert match.num_tokens == 0
    assert "'mamba2' is recurrent and the cache has no room for checkpoints" in match.why
    # The pages are still kept, so that several sequences that compute them again share them.
    assert (cache.allocator.num_free("gqa"), cache.allocator.num_reclaimable("gqa")) == (4, 2)
    forged = Match(2, {"gqa": (0,), "odd": (0,)}, {"gqa": 0, "odd": 0}, "")
    with pytest.raises(ValueError, match=r"skips 2 tokens, but the groups \['mamba2'\]"):
        cache.allocator.adopt(7, forged)


def test_a_cache_without_pages_is_served_without_hits():
    cache = Cache(layout_of(states=True), {"sampling": 3})
    cache.compute([1, 2, 3])
    assert cache.hit([1, 2, 3]) == 0
    assert "no group of this cache is paged" in str(cache.index.explain([1, 2, 3]))


def test_an_adopted_sequence_gets_its_own_sampling_state():
    cache = Cache(MIXED, {"group0": 9, "group1": 9, "sampling": 3})
    cache.compute([1, 2, 3])
    seq, match = cache.adopt([1, 2, 3])
    assert match.num_tokens == 2
    assert cache.allocator.reserve(seq, 3).new_states == {"sampling": 2}


@pytest.mark.parametrize(("pages", "num_tokens"), [((3,), 2), ((0, 0), 4), ((0,), 4), ((0, 1), 2)])
def test_a_match_that_is_no_longer_true_is_refused(pages, num_tokens):
    """The page was evicted between look-up and pin (vLLM #37164), or the match was made up."""
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4])
    with pytest.raises(ValueError, match="look it up again"):
        cache.allocator.adopt(7, Match(num_tokens, {"group0": pages}, {"group0": 0}, ""))
    cache.check()
    cache.allocator.open(7)
