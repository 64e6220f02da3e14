"""Hits and publishing of the prefix index, one operation at a time; `test_index_machine.py` mixes them at random."""

import pytest

from jaxkv.cache.page_allocator import PageCopy
from tests.cache.layouts import reserve
from tests.cache.prefix.scenes import full


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_hit_leaves_the_last_token_to_compute(page_size):
    """The prompts end around a page's end. One of two whole pages of 16 tokens skips 31."""
    for length in (1, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size):
        cache = full(page_size)
        text = list(range(length))
        cache.compute(text)
        assert cache.hit(text) == min(length // page_size * page_size, length - 1)
    assert page_size != 16 or cache.hit(text) == 31


def test_a_page_of_a_full_hit_is_copied_before_its_last_token_is_written():
    """The caller runs the copy."""
    cache = full()
    text = list(range(32))
    cache.compute(text)
    seq, match = cache.adopt(text)
    assert (match.num_tokens, match.pages) == (31, {"group0": (0, 1)})
    reservation = cache.allocator.reserve(seq, 32)
    assert reservation.copies == (PageCopy("group0", 1, 2),)
    assert cache.allocator.pages(seq, "group0") == (0, 2)
    cache.check()


def test_a_longer_text_finds_the_pages_it_shares_and_takes_only_the_others():
    cache = full(page_size=4)
    cache.compute(list(range(10)))
    seq, match = cache.adopt([*range(9), 77, 78])
    assert match.num_tokens == 8
    assert reserve(cache.allocator, seq, 11)[1] == {"group0": [3]}
    assert cache.allocator.pages(seq, "group0") == (0, 1, 3)


def test_generated_tokens_are_found_by_the_next_turn():
    cache = full(page_size=4)
    seq = cache.compute([1, 2, 3, 4, 5], stay=True)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cache.allocator.reserve(seq, 8)
    cache.allocator.commit(seq, 8)
    assert cache.index.publish(seq, text, cache.keys[seq], 8) == 1
    cache.allocator.release(seq)
    assert cache.hit([*text, 10]) == 8


def test_nothing_is_published_before_it_is_computed():
    """vLLM #38715: pages may be shared only once they are computed."""
    cache = full(page_size=4)
    text = list(range(8))
    seq, _ = cache.adopt(text)
    cache.allocator.reserve(seq, 8)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens computed of the 8 given, got 8"):
        cache.index.publish(seq, text, cache.keys[seq], 8)
    cache.allocator.commit(seq, 8)
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
    cache.allocator.reserve(seq, 6)
    cache.allocator.commit(seq, 6)
    assert cache.index.publish(seq, [1, 2, 3, 4, 5, 6], cache.keys[seq], 6) == 3
    cache.check()


def test_ten_equal_prompts_share_every_page():
    """Ten sequences and the index hold each page."""
    cache = full(page_size=4)
    text = list(range(9))
    for _ in range(10):
        cache.compute(text, stay=True)
    pool = cache.allocator.pool("group0")
    assert [pool.references(page) for page in cache.allocator.pages(0, "group0")[:2]] == [
        11,
        11,
    ]
    assert {cache.allocator.pages(seq, "group0")[:2] for seq in range(10)} == {(0, 1)}


def test_a_page_is_found_only_after_the_pages_it_was_computed_after():
    """[X, W, Z] and [X, Y, Z] share X alone."""
    cache = full(page_size=2)
    cache.compute([1, 1, 2, 2, 3, 3])
    assert cache.hit([1, 1, 4, 4, 3, 3, 0]) == 2
    cache.compute([1, 1, 4, 4, 3, 3])
    assert cache.allocator.num_reclaimable("group0") == 5


def test_the_first_page_of_a_name_stays_and_removing_the_other_leaves_it():
    """Registration is idempotent, and a duplicate that goes takes no entry with it."""
    cache = full(page_size=2)
    text = [1, 2, 3, 4, 5]
    first, _ = cache.adopt(text)
    second, _ = cache.adopt(text)
    for seq in (first, second):
        cache.allocator.reserve(seq, 5)
        cache.allocator.commit(seq, 5)
    assert cache.index.publish(first, text, cache.keys[first], 5) == 2
    assert cache.index.publish(first, text, cache.keys[first], 5) == 0
    assert cache.index.publish(second, text, cache.keys[second], 5) == 0
    cache.allocator.release(second)
    cache.check()
    match = cache.index.match(text, cache.index.keys())
    assert match.pages["group0"] == cache.allocator.pages(first, "group0")[:2]


def test_a_page_cannot_get_a_second_name():
    """Changing the name of a kept page is an error."""
    cache = full(page_size=2)
    seq = cache.compute([1, 2], stay=True)
    other = cache.index.keys("other")
    other.begin(cache.keys[seq].epoch, 0, 2, 0)
    with pytest.raises(ValueError, match="cannot keep page 0: the prefix owner holds it already"):
        cache.index.publish(seq, [3, 4], other, 2)
