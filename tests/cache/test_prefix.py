"""What each verb of the prefix index promises, one at a time; `test_prefix_machine.py` mixes them."""

import itertools

import pytest

from jaxkv.cache.accounts import Accounts, Match, PageCopy
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.prefix_keys import page_key
from jaxkv.cache.prefix_match import HitRule, Lookup, longest
from jaxkv.cache.prefix_tree import PrefixTree
from jaxkv.errors import OutOfPages
from tests.cache.layouts import hybrid
from tests.cache.prefix_world import MIXED, layout_of

ONE = layout_of((1, None))
"""Pages of one token, so that a text reads as a path through the tree."""


class Cache:
    """Accounts and index, and sequences that are computed in one go."""

    def __init__(self, layout, counts, **options):
        self.accounts = Accounts(layout, counts)
        self.index = PrefixIndex(layout, self.accounts, **options)
        self.keys = {}
        self.next_seq = 0

    def adopt(self, text, salt=None):
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.keys[seq] = self.index.keys(salt)
        return seq, self.index.adopt(seq, text, self.keys[seq])

    def compute(self, text, salt=None, *, stay=False):
        """Computes a text, publishes it, and ends the sequence unless it is to stay."""
        seq, _ = self.adopt(text, salt)
        self.accounts.reserve(seq, len(text))
        self.accounts.commit(seq, len(text))
        self.index.publish(seq, text, self.keys[seq], len(text))
        self.check()
        if not stay:
            self.accounts.release(seq)
        return seq

    def hit(self, text, salt=None):
        return self.index.match(text, self.index.keys(salt)).num_tokens

    def evict(self, count, group="group0"):
        done = self.index.reclaim({group: count}, {})
        self.check()
        return done

    def check(self):
        self.accounts.check()
        self.index.check()


def full(page_size=16, count=12):
    return Cache(layout_of((page_size, None)), {"group0": count})


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_hit_leaves_the_last_token_to_compute(page_size):
    """S1-18 and reliability 2.3: prompts around a page's end; a prompt of two whole pages of 16 skips 31."""
    for length in (1, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size):
        cache = full(page_size)
        text = list(range(length))
        cache.compute(text)
        assert cache.hit(text) == min(length // page_size * page_size, length - 1)
    assert page_size != 16 or cache.hit(text) == 31


def test_a_page_of_a_full_hit_is_copied_before_its_last_token_is_written():
    """S1-18: the copy is the caller's to run."""
    cache = full()
    text = list(range(32))
    cache.compute(text)
    seq, match = cache.adopt(text)
    assert (match.num_tokens, match.pages) == (31, {"group0": (0, 1)})
    reservation = cache.accounts.reserve(seq, 32)
    assert reservation.copies == (PageCopy("group0", 1, 2),)
    assert cache.accounts.page_table(seq, "group0") == [0, 2]
    cache.check()


def test_a_longer_text_finds_the_pages_it_shares_and_takes_only_the_others():
    cache = full(page_size=4)
    cache.compute(list(range(10)))
    seq, match = cache.adopt([*range(9), 77, 78])
    assert match.num_tokens == 8
    assert cache.accounts.reserve(seq, 11).new_pages == {"group0": [3]}
    assert cache.accounts.page_table(seq, "group0") == [0, 1, 3]


def test_generated_tokens_are_found_by_the_next_turn():
    cache = full(page_size=4)
    seq = cache.compute([1, 2, 3, 4, 5], stay=True)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cache.accounts.reserve(seq, 8)
    cache.accounts.commit(seq, 8)
    assert cache.index.publish(seq, text, cache.keys[seq], 8) == 1
    cache.accounts.release(seq)
    assert cache.hit([*text, 10]) == 8


def test_nothing_is_published_before_it_is_computed():
    """reliability 2.1: vLLM #38715; S5-36's pages may be shared only from then on."""
    cache = full(page_size=4)
    text = list(range(8))
    seq, _ = cache.adopt(text)
    cache.accounts.reserve(seq, 8)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens computed of the 8 given, got 8"):
        cache.index.publish(seq, text, cache.keys[seq], 8)
    cache.accounts.commit(seq, 8)
    with pytest.raises(ValueError, match="has 8 tokens computed of the 4 given, got 8"):
        cache.index.publish(seq, text[:4], cache.keys[seq], 8)
    with pytest.raises(ValueError, match="by keys that never began a sequence"):
        cache.index.publish(seq, text, cache.index.keys(), 8)
    assert cache.hit([*text, 1]) == 0
    assert cache.index.publish(seq, text, cache.keys[seq], 5) == 1
    assert cache.hit([*text, 1]) == 4


def test_what_was_evicted_from_a_sequence_in_flight_comes_back_when_it_fills_a_page():
    cache = full(page_size=2, count=3)
    seq = cache.compute([1, 2, 3, 4], stay=True)
    cache.index.withdraw(seq)
    assert cache.hit([1, 2, 3, 4, 5]) == 0
    cache.accounts.reserve(seq, 6)
    cache.accounts.commit(seq, 6)
    assert cache.index.publish(seq, [1, 2, 3, 4, 5, 6], cache.keys[seq], 6) == 3
    cache.check()


def test_ten_equal_prompts_share_every_page():
    """S5-36: ten sequences and the index hold each."""
    cache = full(page_size=4)
    text = list(range(9))
    for _ in range(10):
        cache.compute(text, stay=True)
    pool = cache.accounts.pool("group0")
    assert [pool.references(page) for page in cache.accounts.page_table(0, "group0")[:2]] == [
        11,
        11,
    ]
    assert {tuple(cache.accounts.page_table(seq, "group0")[:2]) for seq in range(10)} == {(0, 1)}


def test_a_page_is_found_only_after_the_pages_it_was_computed_after():
    """S5-36: [X, W, Z] and [X, Y, Z] share X alone."""
    cache = full(page_size=2)
    cache.compute([1, 1, 2, 2, 3, 3])
    assert cache.hit([1, 1, 4, 4, 3, 3, 0]) == 2
    cache.compute([1, 1, 4, 4, 3, 3])
    assert cache.accounts.num_reclaimable("group0") == 5


def test_the_first_page_of_a_name_stays_and_removing_the_other_leaves_it():
    """S5-35, T-22: registration is idempotent, and a duplicate that goes takes no entry with it."""
    cache = full(page_size=2)
    text = [1, 2, 3, 4, 5]
    first, _ = cache.adopt(text)
    second, _ = cache.adopt(text)
    for seq in (first, second):
        cache.accounts.reserve(seq, 5)
        cache.accounts.commit(seq, 5)
    assert cache.index.publish(first, text, cache.keys[first], 5) == 2
    assert cache.index.publish(first, text, cache.keys[first], 5) == 0
    assert cache.index.publish(second, text, cache.keys[second], 5) == 0
    cache.accounts.release(second)
    cache.check()
    match = cache.index.match(text, cache.index.keys())
    assert match.pages["group0"] == tuple(cache.accounts.page_table(first, "group0")[:2])


def test_a_page_cannot_get_a_second_name():
    """S5-35: changing the name of a kept page is an error."""
    cache = full(page_size=2)
    seq = cache.compute([1, 2], stay=True)
    other = cache.index.keys("other")
    other.epoch = cache.keys[seq].epoch
    with pytest.raises(ValueError, match="cannot keep page 0: it is kept already"):
        cache.index.publish(seq, [3, 4], other, 2)


# Eviction.


def test_only_leaves_go_the_longest_unused_first():
    """S5-34, T-27: A -> B -> {C, F} and A -> D -> E, used in the order F, C, E: three evictions keep A, D, E."""
    cache = Cache(ONE, {"group0": 9})
    for path in ("ABF", "ABC", "ADE"):
        cache.compute([ord(letter) for letter in path])
    assert cache.evict(3)
    assert [cache.hit([*map(ord, path), 0]) for path in ("ABF", "ABC", "ADE")] == [1, 1, 3]


def test_the_hottest_leaf_goes_before_a_cold_page_that_others_follow():
    """S5-34, T-27: there is never an orphan."""
    cache = Cache(ONE, {"group0": 9})
    cache.compute([1, 2, 3])
    cache.compute([1, 2, 3, 4])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 3, 4, 5]), cache.hit([1, 2, 3, 9])] == [3, 3]


def test_a_cached_child_of_a_pinned_page_goes_and_the_page_stays():
    """S5-34."""
    cache = Cache(ONE, {"group0": 9})
    seq = cache.compute([1], stay=True)
    cache.compute([1, 2, 3])
    assert cache.evict(2)
    assert cache.hit([1, 2, 3]) == 1
    assert not cache.evict(1)
    cache.accounts.release(seq)
    assert cache.evict(1)


def test_too_few_to_evict_evicts_none():
    """S5-34, T-25."""
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
    cache.accounts.release(seq)
    assert cache.evict(2)
    assert [cache.hit([first, 5, 6]) for first in (1, 2, 3)] == [2, 0, 2]


def test_a_page_counts_as_used_while_a_sequence_holds_it():
    cache = Cache(ONE, {"group0": 9})
    held = cache.compute([1], stay=True)
    cache.compute([2])
    cache.compute([3])
    assert cache.evict(1)
    cache.accounts.release(held)
    assert cache.evict(1)
    assert [cache.hit([first, 0]) for first in (1, 2, 3)] == [1, 0, 0]


def test_reserve_evicts_exactly_what_is_missing():
    """T-25, T-26."""
    cache = Cache(ONE, {"group0": 6})
    cache.compute([1, 2, 3, 4])
    seq, _ = cache.adopt([7, 8, 9])
    assert cache.accounts.reserve(seq, 3).new_pages == {"group0": [4, 5, 3]}
    assert cache.hit([1, 2, 3, 4, 5]) == 3
    assert cache.index.stats.evictions == 1
    cache.check()


def test_a_reserve_that_fails_evicts_nothing_in_any_group():
    """T-25."""
    cache = Cache(layout_of((1, None), (1, None)), {"group0": 8, "group1": 4})
    cache.compute([1, 2, 3])
    seq, _ = cache.adopt([7, 8])
    with pytest.raises(
        OutOfPages, match="asked for 5 pages of 'group1' for sequence 1 but only 1 of 4 are free"
    ):
        cache.accounts.reserve(seq, 5)
    assert cache.hit([1, 2, 3, 4]) == 3
    assert cache.accounts.num_free("group0") == 5


def test_pages_that_a_match_pinned_are_not_counted_as_room():
    """S5-37, T-26: of six pages the sequence matched four, so that two are left, not six."""
    cache = Cache(ONE, {"group0": 6})
    cache.compute([1, 2, 3, 4])
    seq, match = cache.adopt([1, 2, 3, 4, 5])
    assert match.num_tokens == 4
    assert cache.accounts.num_reclaimable("group0") == 0
    with pytest.raises(OutOfPages):
        cache.accounts.reserve(seq, 7)
    assert cache.accounts.reserve(seq, 6).new_pages == {"group0": [4, 5]}


def test_a_sequence_alone_is_never_kept_waiting_by_its_own_hit():
    """The copy of the last page has no room, so the index gives up its hold on the original."""
    cache = full(page_size=2, count=2)
    cache.compute([1, 2, 3, 4])
    seq, match = cache.adopt([1, 2, 3, 4])
    assert match.num_tokens == 3
    assert cache.accounts.reserve(seq, 4).copies == ()
    cache.check()
    assert cache.hit([1, 2, 3, 4, 5]) == 2


def test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it():
    """Two sequences computed the same first page; the one that is left holds its own copy of it."""
    cache = full(page_size=1, count=3)
    texts = ([1], [1, 2])
    seqs = [cache.adopt(text)[0] for text in texts]
    for seq, text in zip(seqs, texts, strict=True):
        cache.accounts.reserve(seq, len(text))
        cache.accounts.commit(seq, len(text))
        cache.index.publish(seq, text, cache.keys[seq], len(text))
    cache.accounts.release(seqs[0])
    assert cache.accounts.num_free("group0") == 0
    cache.accounts.reserve(seqs[1], 3)
    cache.check()
    assert cache.index.stats.evictions == 2


def test_of_pages_behind_a_page_in_use_only_as_many_go_as_are_missing():
    cache = full(page_size=1, count=6)
    seqs = [cache.adopt(text)[0] for text in ([1, 2], [1, 2, 3])]
    for seq, text in zip(seqs, ([1, 2], [1, 2, 3]), strict=True):
        cache.accounts.reserve(seq, len(text))
        cache.accounts.commit(seq, len(text))
        cache.index.publish(seq, text, cache.keys[seq], len(text))
    cache.accounts.release(seqs[0])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 3, 4]), cache.accounts.num_free("group0")] == [1, 2]


def test_no_more_entries_in_use_are_given_up_than_needed():
    """Two texts like the one above, both behind pages in use: one page is missing, so one text keeps its entries."""
    cache = full(page_size=1, count=6)
    for texts in (([1], [1, 2]), ([3], [3, 4])):
        seqs = [cache.adopt(text)[0] for text in texts]
        for seq, text in zip(seqs, texts, strict=True):
            cache.accounts.reserve(seq, len(text))
            cache.accounts.commit(seq, len(text))
            cache.index.publish(seq, text, cache.keys[seq], len(text))
        cache.accounts.release(seqs[0])
    assert cache.evict(1)
    assert [cache.hit([1, 2, 0]), cache.hit([3, 4, 0])] == [0, 2]


def test_a_page_computed_again_counts_as_used():
    """A sequence that publishes what another did before it: the first page stays, and is no longer the oldest."""
    cache = Cache(ONE, {"group0": 9})
    twin, _ = cache.adopt([1, 2])
    cache.compute([1])
    cache.compute([5])
    cache.accounts.reserve(twin, 1)
    cache.accounts.commit(twin, 1)
    assert cache.index.publish(twin, [1], cache.keys[twin], 1) == 0
    cache.accounts.release(twin)
    assert cache.evict(1)
    assert [cache.hit([1, 0]), cache.hit([5, 0])] == [1, 0]


def test_pages_go_in_order_after_any_number_of_uses():
    cache = Cache(ONE, {"group0": 9})
    for first in range(8):
        cache.compute([first])
    for use in range(300):
        seq, _ = cache.adopt([use * 5 % 8, 9])
        cache.accounts.release(seq)
        cache.index.check()
    assert cache.evict(5)
    # The last three uses were 295, 300 and 305 modulo 8, of 297, 298 and 299 times five.
    assert [first for first in range(8) if cache.hit([first, 0])] == sorted(
        [1485 % 8, 1490 % 8, 1495 % 8]
    )


def test_the_queue_of_candidates_does_not_grow_with_use():
    """reliability 2.1: host memory."""
    cache = Cache(layout_of((1, None), (1, 3)), {"group0": 9, "group1": 9})
    for turn in range(500):
        cache.compute([turn % 3, 1, 2])
    assert all(len(tree._queue) <= 4 * len(tree) + 64 for tree in cache.index._trees.values())


# Several groups, windows and states.


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
    assert cache.accounts.reserve(seq, 10).copies == (PageCopy("group0", 2, 3),)
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
    assert cache.accounts.page_table(seq, "group1") == [0, 0, 0, 3, 4]
    with pytest.raises(ValueError, match="the first for token 6, which do not hold tokens 5 to 7"):
        cache.accounts.slots(seq, "group1", 5, 7)
    cache.accounts.fork(seq, 9)
    cache.check()
    for one in (seq, 9):
        cache.accounts.reserve(one, 13)
        cache.accounts.commit(one, 13)
        cache.check()
    text = list(range(13))
    assert cache.index.publish(seq, text, cache.keys[seq], 13) == 2
    cache.check()
    cache.accounts.release(9)
    cache.accounts.release(seq)
    assert cache.hit([*text, 0]) == 12


def test_a_place_without_a_page_is_never_published():
    """The hit ends inside a page, so that the end of the last full page lies before what the sequence holds."""
    cache = Cache(layout_of((1, None), (4, 2)), {"group0": 30, "group1": 9})
    cache.compute(list(range(12)))
    assert cache.evict(3, "group0")
    assert cache.evict(2, "group1")
    seq, match = cache.adopt(list(range(13)))
    assert (match.num_tokens, match.unneeded) == (9, {"group0": 0, "group1": 2})
    cache.accounts.reserve(seq, 10)
    cache.accounts.commit(seq, 10)
    assert cache.index.publish(seq, list(range(13)), cache.keys[seq], 10) == 1
    cache.check()


def test_pages_before_every_window_go_first():
    """reliability 2.1: if the ends of windows went first, no hit would be left."""
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
    cache.accounts.reserve(mine, 5)
    cache.accounts.commit(mine, 5)
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
    cache.accounts.reserve(seq, 4)
    cache.accounts.commit(seq, 4)
    assert cache.index.publish(seq, text, cache.keys[seq], 4) == 1
    cache.accounts.release(seq)
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
    """T-24: a state cannot be skipped because keys match."""
    cache = Cache(hybrid(), {"gqa": 6, "odd": 12, "mamba2": 5, "sampling": 5})
    cache.compute(list(range(9)))
    match = cache.index.match(list(range(9)), cache.index.keys())
    assert match.num_tokens == 0
    assert "'mamba2' is recurrent and keeps no checkpoint" in match.why
    # S5-02, S5-15: the pages are kept all the same, so that several who compute them again hold them once.
    assert (cache.accounts.num_free("gqa"), cache.accounts.num_reclaimable("gqa")) == (4, 2)
    forged = Match(2, {"gqa": (0,), "odd": (0,)}, {"gqa": 0, "odd": 0}, "")
    with pytest.raises(ValueError, match=r"2 tokens would be skipped, but not by \['mamba2'\]"):
        cache.accounts.adopt(7, forged)


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
    assert cache.accounts.reserve(seq, 3).new_states == {"sampling": 2}


@pytest.mark.parametrize(("pages", "num_tokens"), [((3,), 2), ((0, 0), 4), ((0,), 4), ((0, 1), 2)])
def test_a_match_that_is_no_longer_true_is_refused(pages, num_tokens):
    """reliability 2.1: a page stolen between look-up and pin (vLLM #37164), or a made-up match."""
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4])
    with pytest.raises(ValueError, match="look it up again"):
        cache.accounts.adopt(7, Match(num_tokens, {"group0": pages}, {"group0": 0}, ""))
    cache.check()
    cache.accounts.open(7)


# Keys.


@pytest.mark.parametrize("salts", [(None, ""), ("", b""), ("a", b"a"), ("a", "b"), (None, "None")])
def test_texts_under_different_salts_share_nothing(salts):
    """T-23, reliability S5: and under the same one they do."""
    cache = full(page_size=2)
    cache.compute([1, 2, 3], salts[0])
    assert [cache.hit([1, 2, 3], salt) for salt in salts] == [2, 0]


def first_key(layout=ONE, text=(1, 2, 3, 4), page_size=2, salt=None, **options):
    options = {"identity": "model", "secret": b"secret"} | options
    counts = {group.name: 9 for group in layout.groups}
    index = PrefixIndex(layout, Accounts(layout, counts), **options)
    return index.keys(salt).pages(text, page_size, len(text))[-1].digest


@pytest.mark.parametrize(
    "other",
    [
        {"identity": "model2"},
        {"secret": b"other"},
        {"layout": layout_of((1, 7))},
        {"salt": "tenant"},
        {"page_size": 4},
        {"page_size": 1},
        {"text": (1, 2, 3, 5)},
        {"text": (2, 1, 3, 4)},
        {"identity": "", "secret": b"secretmodel"},
    ],
)
def test_everything_that_changes_a_page_changes_its_key(other):
    """T-23."""
    assert first_key() == first_key()
    assert len(first_key()) == 32
    assert first_key(**other) != first_key()


def test_keys_differ_between_processes():
    """T-23, reliability 2.3: the root is random, and is not Python's hash(None)."""
    assert first_key(secret=None) != first_key(secret=None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((-1, 3), (-2, 3)),
        ((5, 40), (5 + 31, 40 - 1)),
        ((1, 2), (2, 1)),
        ((0, 0), (0, 256)),
        ((1, 23), (12, 3)),
    ],
)
def test_texts_that_collide_elsewhere_have_different_keys(one, other):
    """T-23, reliability S6: Python's hash of -1 and -2, Megatron's +31 and -1, digits run together."""
    assert first_key(text=one) != first_key(text=other)


@pytest.mark.parametrize("token", [2**31, 5 + 2**61 - 1, -(2**31) - 1])
def test_ids_that_are_no_int32_are_refused_rather_than_wrapped(token):
    """T-23: hash(5) == hash(5 + 2**61 - 1)."""
    with pytest.raises(ValueError, match="token ids must be integers that fit int32"):
        first_key(text=(5, token))


def test_different_texts_have_different_keys():
    """T-23, S6: all texts of up to 12 bits, and of three distant ids; 256 bits leave no room for a collision."""
    cache = full(page_size=4, count=2)
    texts = list(itertools.product((0, 1), repeat=12)) + list(
        itertools.product((0, 31, 2**31 - 1, -1), repeat=4)
    )
    digests = {key.digest for text in texts for key in cache.index.keys().pages(text, 4, len(text))}
    distinct = {text[:end] for text in texts for end in range(4, len(text) + 1, 4)}
    assert len(digests) == len(distinct)


def test_a_key_that_collides_is_a_miss(monkeypatch):
    """T-23: the tokens are compared on every hit."""
    monkeypatch.setattr("jaxkv.cache.prefix_keys.hash_parts", lambda *parts: b"always the same")
    cache = full(page_size=2)
    seq, _ = cache.adopt([1, 2, 3])
    cache.accounts.reserve(seq, 3)
    cache.accounts.commit(seq, 3)
    cache.index.publish(seq, [1, 2, 3], cache.keys[seq], 3)
    assert [cache.hit([1, 2, 3]), cache.hit([4, 5, 6])] == [2, 0]


def test_a_growing_text_is_hashed_once_and_a_copy_goes_its_own_way():
    cache = full(page_size=2)
    keys = cache.index.keys()
    text = [1, 2, 3, 4]
    first = keys.pages(text, 2, 4)
    twin = keys.copy()
    assert keys.pages([*text, 5, 6], 2, 6)[:2] == first[:2]
    assert twin.pages([*text, 7, 8], 2, 6)[2] != keys.pages([*text, 5, 6], 2, 6)[2]
    assert keys.pages(text, 2, 3) == first[:1]


# Ends and failures.


def test_a_failed_sequence_takes_its_pages_and_what_follows_them_with_it():
    """Fault row 8: nobody begins from numbers that went wrong."""
    cache = Cache(ONE, {"group0": 9})
    bad = cache.compute([1, 2], stay=True)
    cache.compute([1, 2, 3])
    cache.compute([7, 8])
    assert cache.index.withdraw(bad) == 3
    cache.accounts.release(bad)
    cache.check()
    assert [cache.hit([1, 2, 3, 4]), cache.hit([7, 8, 9])] == [0, 2]


def test_a_lost_cache_loses_every_page_and_every_sequence():
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4], stay=True)
    cache.accounts.reset(keep_prefix=False)
    cache.check()
    assert cache.accounts.num_free("group0") == 12
    assert cache.hit([1, 2, 3, 4]) == 0
    assert cache.index._trees["group0"]._queue == []


def test_a_reset_may_keep_the_prefix():
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4], stay=True)
    cache.accounts.reset(keep_prefix=True)
    assert cache.hit([1, 2, 3, 4]) == 3
    assert cache.accounts.num_reclaimable("group0") == 2


def test_a_sequence_that_began_before_a_clear_publishes_nothing():
    """Fault row 33: weights may have been swapped; the next adoption of the same text publishes again."""
    cache = full(page_size=2)
    text = [1, 2, 3, 4]
    seq = cache.compute(text, stay=True)
    cache.index.clear()
    cache.check()
    cache.accounts.reserve(seq, 6)
    cache.accounts.commit(seq, 6)
    assert cache.index.publish(seq, [*text, 5, 6], cache.keys[seq], 6) == 0
    cache.accounts.release(seq)
    cache.index.adopt(8, text, cache.keys[seq])
    cache.accounts.reserve(8, 4)
    cache.accounts.commit(8, 4)
    assert cache.index.publish(8, text, cache.keys[seq], 4) == 2


def test_accounts_have_one_index():
    cache = full()
    with pytest.raises(ValueError, match="have a keeper already"):
        PrefixIndex(layout_of((16, None)), cache.accounts)


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
            lambda cache, tree: cache.accounts.pool("group0").forget(1),
            r"the pages \[1\] without a reference",
        ),
        (
            lambda cache, tree: cache.accounts.pool("group0").keep(2),
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


def test_the_accounts_count_the_reference_of_the_index():
    cache = full(page_size=2)
    cache.compute([1, 2, 3, 4])
    cache.adopt([1, 2, 3, 4, 5])
    cache.accounts._pools["group0"]._references[1] += 1
    with pytest.raises(ValueError, match=r"another number of times than the pool says: \{1: 2\}"):
        cache.accounts.check()
    cache.accounts._pools["group0"]._references[1] -= 1
    cache.accounts._pools["group0"]._num_idle += 1
    with pytest.raises(ValueError, match=r"the keeper alone holds \[\], counted as 1"):
        cache.accounts.check()


# What it says of itself.


def test_counts_are_exact_on_a_scripted_trace():
    """A-15. A sequence that was adopted and given up for want of room does not count."""
    cache = full(page_size=4, count=4)
    cache.compute(list(range(10)))  # Computes 10.
    cache.compute(list(range(10)))  # Reuses 8, computes 2.
    cache.compute([*range(4), 9, 9])  # Reuses 4, computes 2.
    cache.compute([0, 1, 2])  # Computes 3, and fills no page.
    seq, _ = cache.adopt(list(range(30)))
    cache.accounts.release(seq)
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
    assert "page 0 was never computed after these tokens under this salt" in never.why
    cache.evict(1, "group0")
    tick = cache.index.explain(text).tick
    assert f"page 1 was evicted at tick {tick}" in cache.index.explain(text).why
    assert str(cache.index.explain(text)).splitlines() == [
        f"4 of 10 tokens are in the cache, 6 are computed: group 'group0': page 1 was evicted at tick {tick}",
        f"  group0: keeps 1 of 2 full pages of 4 tokens, alone allows 4 tokens; page 1 was evicted at tick {tick}",
        "  group1: keeps 5 of 5 full pages of 2 tokens, alone allows 9 tokens",
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
    """reliability 2.1: host memory."""
    monkeypatch.setattr("jaxkv.cache.prefix_tree._REMEMBERED", 2)
    cache = Cache(ONE, {"group0": 9})
    for first in (1, 2, 3):
        cache.compute([first])
    cache.evict(3)
    why = [cache.index.explain([first, 0]).why for first in (1, 2, 3)]
    assert ["was evicted" in text for text in why] == [False, True, True]
    assert "or long forgotten" in why[0]


def test_publishing_what_fills_no_page_does_nothing():
    cache = full(page_size=4)
    seq = cache.compute(list(range(4)), stay=True)
    tick = cache.index.explain([1]).tick
    cache.accounts.reserve(seq, 7)
    cache.accounts.commit(seq, 7)
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
