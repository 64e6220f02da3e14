"""The pool allocates, shares and releases ids in any order of calls without losing one."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.cache.pool import PagePool, state_pool
from jaxkv.errors import OutOfPages, OutOfStates
from tests.example_counts import examples

NUM_PAGES = 7


def snapshot(pool):
    return [pool.references(page) for page in range(NUM_PAGES)], pool.num_free


def test_take_is_all_or_nothing():
    pool = PagePool(NUM_PAGES)
    pool.take(5)
    with pytest.raises(OutOfPages, match="asked for 3 pages but only 2 of 7 are free"):
        pool.take(3)
    assert pool.num_free == 2
    assert len(pool.take(2)) == 2


def test_ids_are_handed_out_in_an_order_that_depends_on_the_calls_alone():
    def trace():
        pool = PagePool(NUM_PAGES)
        first = pool.take(4)
        pool.release([2, 0])
        return first, pool.take(5)

    assert trace() == trace() == ([0, 1, 2, 3], [4, 5, 6, 2, 0])


@pytest.mark.parametrize("verb", ["share", "release"])
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 5], r"pages \[5\]: they are free already"),
        ([1, 2, 1], r"pages \[1\] twice in one call"),
        ([1, 7], r"pages \[7\] are not in this pool, which has 0 to 6"),
        ([1, -1], r"pages \[-1\] are not in this pool"),
    ],
)
def test_a_mistake_names_the_ids_and_changes_nothing(verb, pages, message):
    """Double free, duplicate ids in one call and -1 are refused."""
    pool = PagePool(NUM_PAGES)
    pool.take(3)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        getattr(pool, verb)(pages)
    assert snapshot(pool) == before
    pool.check()


def test_a_second_release_is_refused():
    pool = PagePool(NUM_PAGES)
    pool.release(pool.take(1))
    with pytest.raises(ValueError, match=r"cannot release pages \[0\]"):
        pool.release([0])


def test_an_id_is_free_when_its_last_reference_goes():
    pool = PagePool(NUM_PAGES)
    (page,) = pool.take(1)
    pool.share([page])
    assert pool.release([page]) == []
    assert pool.references(page) == 1
    assert pool.release([page]) == [page]
    assert pool.num_free == NUM_PAGES


def test_a_state_pool_never_hands_out_the_zero_state():
    """Fresh sequences read state 0, and none writes it."""
    pool = state_pool(3)
    assert pool.num_total == 2
    assert pool.take(2) == [1, 2]
    with pytest.raises(OutOfStates, match="asked for 1 states but only 0 of 2 are free"):
        pool.take(1)
    with pytest.raises(ValueError, match=r"states \[0\] are not in this pool, which has 1 to 2"):
        pool.release([0])


@pytest.mark.parametrize(
    "sizes", [(0, 0, "page"), (1, 1, "state"), (4, -1, "page"), (4, 0, "block")]
)
def test_an_empty_pool_or_an_unknown_noun_is_refused(sizes):
    with pytest.raises(ValueError):
        PagePool(*sizes)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="cannot take -1 pages"):
        PagePool(NUM_PAGES).take(-1)


def test_check_finds_a_page_that_is_both_free_and_held():
    pool = PagePool(NUM_PAGES)
    pool.take(2)
    pool._free.append(1)
    with pytest.raises(ValueError, match=r"corrupt: \[1\] are both free and referenced"):
        pool.check()


def test_the_prefix_owner_holds_one_reference_and_alone_makes_an_id_idle():
    """An id that only the prefix owner holds is counted once, and is not free."""
    pool = PagePool(NUM_PAGES)
    (page,) = pool.take(1)
    pool.keep(page)
    assert (pool.references(page), pool.num_idle, pool.kept) == (2, 0, {page})
    pool.release([page])
    assert (pool.references(page), pool.num_idle, pool.num_free) == (1, 1, NUM_PAGES - 1)
    pool.share([page])
    assert pool.num_idle == 0
    pool.release([page])
    assert pool.release_kept(page)
    assert (pool.num_idle, pool.num_free, pool.kept) == (0, NUM_PAGES, set())
    pool.check()


def test_the_prefix_owners_mistakes_and_those_at_its_cost_change_nothing():
    """Only the prefix owner gives up its own reference."""
    pool = PagePool(NUM_PAGES)
    kept, held = pool.take(2)
    pool.keep(kept)
    with pytest.raises(ValueError, match="cannot keep page 0: the prefix owner holds it already"):
        pool.keep(kept)
    with pytest.raises(
        ValueError, match="cannot release page 1: the prefix owner does not hold it"
    ):
        pool.release_kept(held)
    with pytest.raises(ValueError, match=r"cannot share pages \[5\]: they are free already"):
        pool.keep(5)
    pool.release([kept])
    with pytest.raises(
        ValueError, match=r"cannot release pages \[0\]: only the prefix owner holds them"
    ):
        pool.release([held, kept])
    assert (pool.references(held), pool.references(kept)) == (1, 1)
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random programs of holders, and of a prefix owner, against a counter."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held = []
        self.kept = set()

    def references(self):
        return Counter([page for pages in self.held for page in pages] + sorted(self.kept))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from(sorted({page for pages in self.held for page in pages})))
        if page not in self.kept:
            self.pool.keep(page)
            self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data):
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.kept.remove(page)
        assert self.pool.release_kept(page) == (page not in self.references())

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def take(self, count):
        free = NUM_PAGES - len(self.references())
        if count > free:
            with pytest.raises(OutOfPages):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.references())
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.held))
        self.pool.share(pages)
        self.held.append(list(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        freed = self.pool.release(pages)
        assert freed == [page for page in pages if page not in self.references()]

    @rule(page=st.integers(-1, NUM_PAGES), verb=st.sampled_from(["share", "release"]))
    def misuse_a_free_page(self, page, verb):
        if page not in self.references():
            with pytest.raises(ValueError):
                getattr(self.pool, verb)([page])

    @invariant()
    def no_page_is_lost(self):
        self.pool.check()
        assert self.pool.num_free + len(self.references()) == NUM_PAGES
        for page in range(NUM_PAGES):
            assert self.pool.references(page) == self.references()[page]
        assert self.pool.kept == self.kept
        assert self.pool.num_idle == sum(self.references()[page] == 1 for page in self.kept)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None
)
