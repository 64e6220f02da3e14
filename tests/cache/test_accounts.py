"""What each verb of the accounts promises, one at a time; `test_accounts_machine.py` mixes them."""

import numpy as np
import pytest

from jaxkv.cache.accounts import Accounts, PageCopy
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.errors import OutOfPages, OutOfStates
from tests.cache.layouts import HALF, MAMBA2, hybrid

COUNTS = {"gqa": 6, "odd": 12, "mamba2": 5, "sampling": 5}


def computed(accounts, seq, num_tokens):
    accounts.open(seq)
    accounts.reserve(seq, num_tokens)
    accounts.commit(seq, num_tokens)


def free(accounts):
    return {name: accounts.num_free(name) for name in COUNTS}


@pytest.fixture
def accounts():
    accounts = Accounts(hybrid(), COUNTS)
    yield accounts
    accounts.check()


def test_reserve_gives_pages_and_states_in_every_group(accounts):
    accounts.open(7)
    reservation = accounts.reserve(7, 5)
    assert reservation.new_pages == {"gqa": [0, 1], "odd": [0, 1, 2]}
    assert reservation.new_states == {"mamba2": 1, "sampling": 1}
    assert reservation.copies == ()
    assert accounts.page_table(7, "odd") == [0, 1, 2]
    assert free(accounts) == {"gqa": 4, "odd": 9, "mamba2": 3, "sampling": 3}


def test_a_second_reserve_takes_only_what_is_missing(accounts):
    accounts.open(7)
    accounts.reserve(7, 5)
    assert not any(accounts.reserve(7, 5).new_pages.values())
    again = accounts.reserve(7, 9)
    assert again.new_pages == {"gqa": [2], "odd": [3, 4]}
    assert again.new_states == {}
    accounts.reserve(7, 3)
    accounts.commit(7, 9)


@pytest.mark.parametrize(
    ("scarce", "counts", "message"),
    [
        ("gqa", COUNTS, "asked for 6 pages of 'gqa' for sequence 7 but only 5 of 6 are free"),
        (
            "odd",
            COUNTS | {"gqa": 9},
            "asked for 13 pages of 'odd' for sequence 7 but only 11 of 12",
        ),
    ],
)
def test_reserve_is_all_or_nothing_over_the_groups(scarce, counts, message):
    """T-25: whichever group is short, none gives anything."""
    accounts = Accounts(hybrid(), counts)
    accounts.open(7)
    accounts.reserve(7, 1)
    before = free(accounts), accounts.page_table(7, scarce)
    with pytest.raises(OutOfPages, match=message):
        accounts.reserve(7, 28)
    assert (free(accounts), accounts.page_table(7, scarce)) == before
    accounts.check()


def test_too_few_states_take_no_pages():
    """T-25."""
    accounts = Accounts(hybrid(), COUNTS | {"sampling": 2})
    computed(accounts, 1, 1)
    accounts.open(2)
    before = free(accounts)
    with pytest.raises(OutOfStates, match="asked for 1 states of 'sampling' for sequence 2"):
        accounts.reserve(2, 4)
    assert free(accounts) == before
    accounts.check()


def test_slots_are_int32_and_follow_the_page_table(accounts):
    """T-11, T-31."""
    computed(accounts, 1, 6)
    computed(accounts, 2, 3)
    accounts.reserve(1, 10)
    assert accounts.page_table(1, "gqa") == [0, 1, 3]
    slots = accounts.slots(1, "gqa", 6, 10)
    assert slots.dtype == np.int32
    np.testing.assert_array_equal(slots, [6, 7, 12, 13])
    assert accounts.slots(1, "gqa", 4, 4).shape == (0,)


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (-1, 2), (3, 2)])
def test_slots_outside_the_reserved_pages_are_refused(accounts, start, stop):
    """S1-15, T-03: never a truncation or a wrapped id."""
    computed(accounts, 1, 6)
    with pytest.raises(ValueError, match=f"do not hold tokens {start} to {stop}"):
        accounts.slots(1, "gqa", start, stop)


def test_a_fresh_sequence_reads_the_zero_state_until_its_first_commit(accounts):
    accounts.open(1)
    accounts.reserve(1, 3)
    assert accounts.states(1, "mamba2") == (0, 1)
    assert accounts.states(1, "sampling") == (1, 1)
    accounts.commit(1, 3)
    assert accounts.states(1, "mamba2") == (1, 1)


def test_a_commit_of_nothing_does_not_read_a_state_that_was_never_written(accounts):
    accounts.open(1)
    accounts.reserve(1, 0)
    accounts.commit(1, 0)
    assert accounts.states(1, "mamba2") == (0, 1)


def test_commit_stays_between_what_is_computed_and_what_is_reserved(accounts):
    computed(accounts, 1, 3)
    accounts.reserve(1, 5)
    with pytest.raises(ValueError, match="can commit 3 to 5 tokens, got 6"):
        accounts.commit(1, 6)
    with pytest.raises(ValueError, match="can commit 3 to 5 tokens, got 2"):
        accounts.commit(1, 2)
    assert accounts.num_tokens(1) == 3
    with pytest.raises(ValueError, match="has 3 computed tokens, got 2"):
        accounts.reserve(1, 2)


def test_a_fork_takes_nothing_until_one_writes(accounts):
    computed(accounts, 1, 6)
    before = free(accounts)
    accounts.fork(1, 2)
    assert free(accounts) == before
    assert accounts.num_tokens(2) == 6
    assert accounts.page_table(2, "gqa") == accounts.page_table(1, "gqa")


def test_the_first_writer_of_a_shared_page_gets_a_copy_and_the_last_keeps_it(accounts):
    """The shared page is half full in "gqa" (6 of 8) and full in "odd" (6 of 6)."""
    computed(accounts, 1, 6)
    accounts.fork(1, 2)
    child = accounts.reserve(2, 7)
    assert child.copies == (PageCopy("gqa", 1, 2), PageCopy("sampling", 1, 2))
    assert accounts.page_table(2, "gqa") == [0, 2]
    assert accounts.page_table(2, "odd") == [0, 1, 2, 3]
    parent = accounts.reserve(1, 7)
    assert parent.copies == ()
    assert parent.new_pages == {"gqa": [], "odd": [4]}
    assert accounts.page_table(1, "gqa") == [0, 1]


def test_a_fork_at_a_page_boundary_copies_no_page(accounts):
    computed(accounts, 1, 4)
    accounts.fork(1, 2)
    assert [copy.group for copy in accounts.reserve(2, 5).copies] == ["sampling"]


def test_nothing_to_write_copies_no_page(accounts):
    computed(accounts, 1, 6)
    accounts.fork(1, 2)
    assert accounts.reserve(2, 6).new_pages == {"gqa": [], "odd": []}


def test_forked_recurrent_states_are_read_together_and_written_apart(accounts):
    computed(accounts, 1, 3)
    accounts.fork(1, 2)
    accounts.reserve(2, 4)
    assert accounts.states(2, "mamba2") == (1, 2)
    accounts.reserve(1, 4)
    assert accounts.states(1, "mamba2") == (1, 3)
    accounts.commit(1, 4)
    accounts.commit(2, 4)
    assert accounts.states(1, "mamba2") == (3, 3)
    assert accounts.states(2, "mamba2") == (2, 2)
    # State 1 was only read by then and is free again.
    assert accounts.num_free("mamba2") == 2


def test_sequences_that_share_a_state_always_advance_even_in_the_smallest_pool():
    """One state per sequence: when all want their own at once some wait, and a later step serves them."""
    accounts = Accounts(group_layers(place([MAMBA2])), {"mamba2": 4})
    computed(accounts, 0, 2)
    accounts.fork(0, 1)
    accounts.fork(0, 2)
    waiting = [0, 1, 2]
    for _ in range(2):
        served = []
        for seq in waiting:
            try:
                accounts.reserve(seq, 3)
            except OutOfStates:
                continue
            served.append(seq)
        assert served
        for seq in served:
            accounts.commit(seq, 3)
        waiting = [seq for seq in waiting if seq not in served]
    assert waiting == []
    accounts.check()


def test_a_fork_is_refused_while_a_step_may_be_writing(accounts):
    computed(accounts, 1, 3)
    accounts.reserve(1, 4)
    with pytest.raises(ValueError, match="4 tokens reserved and 3 computed; commit"):
        accounts.fork(1, 2)
    accounts.commit(1, 4)
    accounts.fork(1, 2)


def test_release_gives_everything_back(accounts):
    computed(accounts, 1, 9)
    accounts.fork(1, 2)
    accounts.reserve(2, 10)
    accounts.release(1)
    accounts.release(2)
    assert free(accounts) == {"gqa": 6, "odd": 12, "mamba2": 4, "sampling": 4}


def test_a_sequence_that_is_not_open_is_refused_by_every_verb(accounts):
    """reliability 2.1: a second release raises."""
    computed(accounts, 1, 1)
    accounts.release(1)
    for use in (
        lambda: accounts.release(1),
        lambda: accounts.reserve(1, 1),
        lambda: accounts.commit(1, 1),
        lambda: accounts.fork(1, 2),
        lambda: accounts.page_table(1, "gqa"),
        lambda: accounts.states(1, "mamba2"),
        lambda: accounts.num_tokens(1),
    ):
        with pytest.raises(ValueError, match="sequence 1 is not open"):
            use()
    computed(accounts, 2, 1)
    with pytest.raises(ValueError, match="sequence 2 is open already"):
        accounts.open(2)
    with pytest.raises(ValueError, match="sequence 2 is open already"):
        accounts.fork(2, 2)


def test_groups_are_asked_only_for_what_they_hand_out(accounts):
    computed(accounts, 1, 1)
    with pytest.raises(ValueError, match="'mamba2' holds states, not pages"):
        accounts.page_table(1, "mamba2")
    with pytest.raises(ValueError, match="'gqa' holds pages, not states"):
        accounts.states(1, "gqa")
    with pytest.raises(ValueError, match="no group 'nope'"):
        accounts.num_free("nope")
    accounts.open(2)
    with pytest.raises(ValueError, match="no state to write in 'mamba2'; reserve first"):
        accounts.states(2, "mamba2")


def test_the_longest_sequence_follows_from_the_scarcest_group():
    assert Accounts(hybrid(), COUNTS).max_tokens == 24
    assert Accounts(hybrid(), COUNTS | {"odd": 3}).max_tokens == 6
    assert Accounts(group_layers(place([sampling(5)])), {"sampling": 2}).max_tokens is None


def test_counts_must_fit_the_layout():
    with pytest.raises(ValueError, match="counts must be"):
        Accounts(hybrid(), {"gqa": 4})


def damage_by_a_lost_page(accounts):
    accounts._pools["gqa"].take(1)
    return r"'gqa': 3 pages are taken and sequences hold 2"


def damage_by_a_forgotten_reference(accounts):
    accounts._pools["gqa"].share([1])
    return r"another number of times than the pool says: \{1: 1\}"


def damage_by_a_short_table(accounts):
    accounts._held[1].reserved = 99
    return r"sequence 1 has 6 tokens computed and 99 reserved, but too few"


def damage_by_a_shared_page_about_to_be_written(accounts):
    accounts.fork(1, 2)
    accounts._held[2].reserved = 7
    accounts._held[2].pages["odd"] += accounts._pools["odd"].take(1)
    return r"sequence 2 .* may write what others hold: \{'gqa': \[1\]\}"


def damage_by_a_shared_state_about_to_be_written(accounts):
    accounts.fork(1, 2)
    accounts._held[2].states["sampling"].write = 1
    accounts._held[2].pages["gqa"] += accounts._pools["gqa"].take(1)
    accounts._held[2].pages["odd"] += accounts._pools["odd"].take(1)
    accounts._held[2].reserved = 8
    return r"may write what others hold: .*'sampling': \[1\]"


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_a_lost_page,
        damage_by_a_forgotten_reference,
        damage_by_a_short_table,
        damage_by_a_shared_page_about_to_be_written,
        damage_by_a_shared_state_about_to_be_written,
    ],
)
def test_check_finds_contradictions_and_names_the_ids(damage):
    accounts = Accounts(hybrid(), COUNTS)
    computed(accounts, 1, 6)
    accounts.check()
    message = damage(accounts)
    with pytest.raises(ValueError, match=message):
        accounts.check()


def test_gqa_alone_needs_no_states():
    accounts = Accounts(group_layers(place([gqa(1, 2, **HALF)])), {"gqa": 2})
    computed(accounts, 1, 8)
    assert accounts.reserve(1, 8).new_states == {}
