"""The page allocator, one operation at a time; `test_page_allocator_machine.py` mixes them at random."""

import pytest

from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.sequence_pages import State
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.errors import OutOfPages, OutOfStates
from tests.cache.layouts import HALF, MAMBA2, hybrid, reserve

COUNTS = {"gqa": 6, "odd": 12, "mamba2": 5, "sampling": 5}


def computed(allocator, seq, num_tokens):
    allocator.open(seq)
    allocator.reserve(seq, num_tokens)
    allocator.commit(seq, num_tokens)


def free(allocator):
    return {name: allocator.num_free(name) for name in COUNTS}


@pytest.fixture
def allocator():
    allocator = PageAllocator(hybrid(), COUNTS)
    yield allocator
    allocator.check()


def test_reserve_gives_pages_and_states_in_every_group(allocator):
    allocator.open(7)
    reservation, taken = reserve(allocator, 7, 5)
    assert taken == {"gqa": [0, 1], "odd": [0, 1, 2]}
    assert reservation.new_states == {"mamba2": 1, "sampling": 1}
    assert reservation.copies == ()
    assert allocator.pages(7, "odd") == (0, 1, 2)
    assert free(allocator) == {"gqa": 4, "odd": 9, "mamba2": 3, "sampling": 3}


def test_a_second_reserve_takes_only_what_is_missing(allocator):
    allocator.open(7)
    allocator.reserve(7, 5)
    assert not any(reserve(allocator, 7, 5)[1].values())
    again, taken = reserve(allocator, 7, 9)
    assert taken == {"gqa": [2], "odd": [3, 4]}
    assert again.new_states == {}
    allocator.reserve(7, 3)
    allocator.commit(7, 9)


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
    """If one group is short, none gives anything."""
    allocator = PageAllocator(hybrid(), counts)
    allocator.open(7)
    allocator.reserve(7, 1)
    before = free(allocator), allocator.pages(7, scarce)
    with pytest.raises(OutOfPages, match=message):
        allocator.reserve(7, 28)
    assert (free(allocator), allocator.pages(7, scarce)) == before
    allocator.check()


def test_truncate_takes_back_all_sequences_or_none():
    layout = group_layers(place([gqa(1, 2, **HALF)]))
    allocator = PageAllocator(layout, {"gqa": 6})
    computed(allocator, 1, 9)
    computed(allocator, 2, 5)
    with pytest.raises(ValueError, match="sequence 2 has 5 computed tokens, got 6 to keep"):
        allocator.truncate({1: 3, 2: 6})
    assert [allocator.num_tokens(seq) for seq in (1, 2)] == [9, 5]
    changes = allocator.held(1).changes
    allocator.truncate({1: 4, 2: 4})
    assert [allocator.pages(seq, "gqa") for seq in (1, 2)] == [(0,), (3,)]
    assert allocator.held(1).changes > changes
    assert allocator.num_free("gqa") == 4
    allocator.check()


def test_a_shared_page_that_truncate_leaves_is_copied_before_it_is_written():
    layout = group_layers(place([gqa(1, 2, **HALF)]))
    allocator = PageAllocator(layout, {"gqa": 6})
    computed(allocator, 1, 8)
    allocator.fork(1, 2)
    allocator.truncate({1: 6})
    assert not allocator.extend(1, 7)
    assert allocator.reserve(1, 7).copies == (PageCopy("gqa", 1, 2),)
    assert allocator.pages(2, "gqa") == (0, 1)
    allocator.check()


def test_rejected_tokens_are_written_over_in_the_pages_that_they_have():
    layout = group_layers(place([gqa(1, 2, **HALF)]))
    allocator = PageAllocator(layout, {"gqa": 6})
    computed(allocator, 1, 9)
    changes, writable = allocator.held(1).changes, allocator.held(1).writable
    with pytest.raises(ValueError, match="has 9 computed tokens, got 10 to keep"):
        allocator.take_back(1, 10)
    allocator.take_back(1, 7)
    assert allocator.num_tokens(1) == 7
    assert allocator.pages(1, "gqa") == (0, 1, 2)
    assert (allocator.held(1).changes, allocator.held(1).writable) == (changes, writable)
    allocator.commit(1, 9)
    # Another sequence shares the pages now, so they must not be written.
    allocator.fork(1, 2)
    allocator.take_back(1, 7)
    assert allocator.held(1).writable == 7
    assert allocator.reserve(1, 8).copies == (PageCopy("gqa", 1, 3),)
    allocator.check()


def test_tokens_of_a_sequence_with_a_state_are_not_truncated(allocator):
    """But drafts are taken back: the step that rejects them has left them out of the state."""
    computed(allocator, 1, 5)
    with pytest.raises(ValueError, match="has a state after 5 tokens, which cannot be taken back"):
        allocator.truncate({1: 4})
    allocator.truncate({1: 5})
    assert allocator.num_tokens(1) == 5
    state = allocator.states(1, "mamba2")
    allocator.take_back(1, 4)
    assert allocator.num_tokens(1) == 4
    assert allocator.states(1, "mamba2") == state


def test_too_few_states_take_no_pages():
    allocator = PageAllocator(hybrid(), COUNTS | {"sampling": 2})
    computed(allocator, 1, 1)
    allocator.open(2)
    before = free(allocator)
    with pytest.raises(OutOfStates, match="asked for 1 states of 'sampling' for sequence 2"):
        allocator.reserve(2, 4)
    assert free(allocator) == before
    allocator.check()


def test_a_fresh_sequence_reads_the_zero_state_until_its_first_commit(allocator):
    allocator.open(1)
    allocator.reserve(1, 3)
    assert allocator.states(1, "mamba2") == (0, 1)
    assert allocator.states(1, "sampling") == (1, 1)
    allocator.commit(1, 3)
    assert allocator.states(1, "mamba2") == (1, 1)


def test_a_commit_of_nothing_does_not_read_a_state_that_was_never_written(allocator):
    allocator.open(1)
    allocator.reserve(1, 0)
    allocator.commit(1, 0)
    assert allocator.states(1, "mamba2") == (0, 1)


def test_states_that_a_step_without_tokens_wrote_are_read_next_and_by_forks(allocator):
    allocator.open(1)
    allocator.reserve(1, 0)
    _, written = allocator.states(1, "mamba2")
    allocator.commit_states(1)
    assert allocator.states(1, "mamba2") == (written, written)
    allocator.fork(1, 2)
    allocator.reserve(2, 1)
    assert allocator.states(2, "mamba2")[0] == written
    allocator.check()


def test_commit_stays_between_what_is_computed_and_what_is_reserved(allocator):
    computed(allocator, 1, 3)
    allocator.reserve(1, 5)
    with pytest.raises(ValueError, match="can commit 3 to 5 tokens, got 6"):
        allocator.commit(1, 6)
    with pytest.raises(ValueError, match="can commit 3 to 5 tokens, got 2"):
        allocator.commit(1, 2)
    assert allocator.num_tokens(1) == 3
    with pytest.raises(ValueError, match="has 3 computed tokens, got 2"):
        allocator.reserve(1, 2)


def test_a_fork_takes_nothing_until_one_writes(allocator):
    computed(allocator, 1, 6)
    before = free(allocator)
    allocator.fork(1, 2)
    assert free(allocator) == before
    assert allocator.num_tokens(2) == 6
    assert allocator.pages(2, "gqa") == allocator.pages(1, "gqa")


def test_the_first_writer_of_a_shared_page_gets_a_copy_and_the_last_keeps_it(allocator):
    """The shared page is half full in "gqa" (6 of 8) and full in "odd" (6 of 6)."""
    computed(allocator, 1, 6)
    allocator.fork(1, 2)
    child = allocator.reserve(2, 7)
    assert child.copies == (PageCopy("gqa", 1, 2), PageCopy("sampling", 1, 2))
    assert allocator.pages(2, "gqa") == (0, 2)
    assert allocator.pages(2, "odd") == (0, 1, 2, 3)
    parent, taken = reserve(allocator, 1, 7)
    assert parent.copies == ()
    assert taken == {"gqa": [], "odd": [4]}
    assert allocator.pages(1, "gqa") == (0, 1)


def test_a_fork_at_a_page_boundary_copies_no_page(allocator):
    computed(allocator, 1, 4)
    allocator.fork(1, 2)
    assert [copy.group for copy in allocator.reserve(2, 5).copies] == ["sampling"]


def test_nothing_to_write_copies_no_page(allocator):
    computed(allocator, 1, 6)
    allocator.fork(1, 2)
    assert reserve(allocator, 2, 6)[1] == {"gqa": [], "odd": []}


def test_forked_recurrent_states_are_read_together_and_written_apart(allocator):
    computed(allocator, 1, 3)
    allocator.fork(1, 2)
    allocator.reserve(2, 4)
    assert allocator.states(2, "mamba2") == (1, 2)
    allocator.reserve(1, 4)
    assert allocator.states(1, "mamba2") == (1, 3)
    allocator.commit(1, 4)
    allocator.commit(2, 4)
    assert allocator.states(1, "mamba2") == (3, 3)
    assert allocator.states(2, "mamba2") == (2, 2)
    # State 1 was only read by then and is free again.
    assert allocator.num_free("mamba2") == 2


def test_sequences_that_share_a_state_always_advance_even_in_the_smallest_pool():
    """One state per sequence: when all want their own at once some wait, and a later step serves them."""
    allocator = PageAllocator(group_layers(place([MAMBA2])), {"mamba2": 4})
    computed(allocator, 0, 2)
    allocator.fork(0, 1)
    allocator.fork(0, 2)
    waiting = [0, 1, 2]
    for _ in range(2):
        served = []
        for seq in waiting:
            try:
                allocator.reserve(seq, 3)
            except OutOfStates:
                continue
            served.append(seq)
        assert served
        for seq in served:
            allocator.commit(seq, 3)
        waiting = [seq for seq in waiting if seq not in served]
    assert waiting == []
    allocator.check()


def test_a_fork_is_refused_while_a_step_may_be_writing(allocator):
    computed(allocator, 1, 3)
    allocator.reserve(1, 4)
    with pytest.raises(ValueError, match="4 tokens writable and 3 computed; commit"):
        allocator.fork(1, 2)
    allocator.commit(1, 4)
    allocator.fork(1, 2)


def test_release_gives_everything_back(allocator):
    computed(allocator, 1, 9)
    allocator.fork(1, 2)
    allocator.reserve(2, 10)
    allocator.release(1)
    allocator.release(2)
    assert free(allocator) == {"gqa": 6, "odd": 12, "mamba2": 4, "sampling": 4}


def test_a_sequence_that_is_not_open_is_refused_by_every_verb(allocator):
    """The second release of a sequence raises."""
    computed(allocator, 1, 1)
    allocator.release(1)
    for use in (
        lambda: allocator.release(1),
        lambda: allocator.reserve(1, 1),
        lambda: allocator.extend(1, 1),
        lambda: allocator.commit(1, 1),
        lambda: allocator.fork(1, 2),
        lambda: allocator.pages(1, "gqa"),
        lambda: allocator.states(1, "mamba2"),
        lambda: allocator.num_tokens(1),
    ):
        with pytest.raises(ValueError, match="sequence 1 is not open"):
            use()
    computed(allocator, 2, 1)
    with pytest.raises(ValueError, match="sequence 2 is open already"):
        allocator.open(2)
    with pytest.raises(ValueError, match="sequence 2 is open already"):
        allocator.fork(2, 2)


def test_groups_are_asked_only_for_what_they_hand_out(allocator):
    computed(allocator, 1, 1)
    with pytest.raises(ValueError, match="'mamba2' holds states, not pages"):
        allocator.pages(1, "mamba2")
    with pytest.raises(ValueError, match="'gqa' holds pages, not states"):
        allocator.states(1, "gqa")
    with pytest.raises(ValueError, match="no group 'nope'"):
        allocator.num_free("nope")
    allocator.open(2)
    with pytest.raises(ValueError, match="no state to write in 'mamba2'; reserve first"):
        allocator.states(2, "mamba2")


def test_the_longest_sequence_follows_from_the_scarcest_group():
    assert PageAllocator(hybrid(), COUNTS).max_tokens == 24
    assert PageAllocator(hybrid(), COUNTS | {"odd": 3}).max_tokens == 6
    assert PageAllocator(group_layers(place([sampling(5)])), {"sampling": 2}).max_tokens is None


def test_counts_must_fit_the_layout():
    with pytest.raises(ValueError, match="counts must be"):
        PageAllocator(hybrid(), {"gqa": 4})


def damage_by_a_lost_page(allocator):
    allocator.pool("gqa").take(1)
    return r"'gqa': the counted and the actual references of these pages differ: \{2: \(1, 0\)\}"


def damage_by_a_forgotten_reference(allocator):
    allocator.pool("gqa").share([1])
    return r"'gqa': the counted and the actual references of these pages differ: \{1: \(2, 1\)\}"


def damage_by_a_short_table(allocator):
    allocator._held[1].writable = allocator._held[1].reserved = 99
    return r"sequence 1 has 6 tokens computed, 99 writable and 99 reserved, but too few"


def damage_by_a_shared_page_about_to_be_written(allocator):
    allocator.fork(1, 2)
    allocator._held[2].writable = allocator._held[2].reserved = 7
    allocator._held[2].pages["odd"] += tuple(allocator.pool("odd").take(1))
    return r"sequence 2 .* may write shared ones: \{'gqa': \[1\]\}"


def damage_by_a_shared_state_about_to_be_written(allocator):
    allocator.fork(1, 2)
    held = allocator._held[2]
    held.states["sampling"] = State(held.states["sampling"].read, 1)
    for name in ("gqa", "odd"):
        held.pages[name] += tuple(allocator.pool(name).take(1))
    held.writable = held.reserved = 8
    return r"may write shared ones: .*'sampling': \[1\]"


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
    allocator = PageAllocator(hybrid(), COUNTS)
    computed(allocator, 1, 6)
    allocator.check()
    message = damage(allocator)
    with pytest.raises(ValueError, match=message):
        allocator.check()


def test_gqa_alone_needs_no_states():
    allocator = PageAllocator(group_layers(place([gqa(1, 2, **HALF)])), {"gqa": 2})
    computed(allocator, 1, 8)
    assert allocator.reserve(1, 8).new_states == {}


def test_extend_does_only_what_takes_no_page_and_copies_none(allocator):
    computed(allocator, 7, 5)
    assert not allocator.extend(7, 6)  # A state may have to be taken.
    alone = PageAllocator(group_layers(place([gqa(1, 2, **HALF)])), {"gqa": 4})
    size = alone.pool("gqa").num_total
    computed(alone, 1, 5)
    held = alone.held(1)
    assert not alone.extend(1, 4)
    assert alone.extend(1, 6)
    assert (held.computed, held.writable, held.reserved) == (5, 6, 6)
    assert alone.num_free("gqa") == size - len(held.pages["gqa"])
    alone.commit(1, 6)
    alone.fork(1, 2)
    assert not alone.extend(1, 7)  # The fork shares the page.
    assert alone.reserve(1, 7).copies
    alone.commit(1, 7)
    full = len(held.pages["gqa"]) * 4
    assert alone.extend(1, full)
    assert not alone.extend(1, full + 1)
    alone.check()


def test_what_a_sequence_holds_is_read_only_outside_of_the_allocator(allocator):
    """Other code cannot change the records of the books."""
    computed(allocator, 1, 6)
    for view in (allocator.held(1), allocator.held_by([1])[0], allocator.view().sequences[1]):
        with pytest.raises(AttributeError):
            view.computed = 7
        with pytest.raises(AttributeError):
            view.pages = {}
        with pytest.raises(AttributeError):
            view.states["mamba2"].read = 2
        with pytest.raises(TypeError):
            view.pages["gqa"] = ()
        with pytest.raises(TypeError):
            view.pending_checkpoints[3] = {}
        with pytest.raises(AttributeError):
            view.pages["gqa"].append(1)
    with pytest.raises(TypeError):
        allocator.view().sequences[2] = allocator.held(1)


def test_a_view_follows_its_sequence(allocator):
    computed(allocator, 1, 6)
    held = allocator.held(1)
    before = held.changes
    allocator.reserve(1, 9, whole=12)
    assert (held.computed, held.writable, held.reserved) == (6, 9, 12)
    assert held.changes > before
    assert held.pages == {"gqa": (0, 1, 2), "odd": (0, 1, 2, 3, 4, 5)}
    allocator.commit(1, 9)
    assert held.computed == 9
    view = allocator.view()
    assert view.references["odd"] == dict.fromkeys(range(6), 1)
    assert view.kept["gqa"] == frozenset()
    with pytest.raises(ValueError, match="sequence 4 is not open"):
        allocator.held_by([1, 4])


def test_a_swap_in_holds_what_is_there_and_takes_what_comes_or_nothing(allocator):
    computed(allocator, 1, 6)
    before = free(allocator)
    allocator.open(-1)
    allocator.hold(-1, "gqa", [0])
    allocator.hold(-1, "mamba2", [1])
    assert free(allocator) == before
    with pytest.raises(OutOfPages, match="asked for 13 pages of 'odd' for sequence -1"):
        allocator.place(-1, {"gqa": 2, "odd": 13})
    assert free(allocator) == before
    assert allocator.place(-1, {"gqa": 2, "odd": 1}) == {"gqa": [2, 3], "odd": [3]}
    assert allocator.held(-1).pages == {"gqa": (0, 2, 3), "odd": (3,)}
    assert allocator.held(-1).states["mamba2"] == (1, 0)
    allocator.check()
    allocator.release(-1)
    assert free(allocator) == before


def test_a_snapshot_is_kept_or_released_with_its_sequence(allocator):
    computed(allocator, 1, 6)
    states = allocator.take_pending_checkpoint(1, 4)
    assert allocator.held(1).pending_checkpoints == {4: {"mamba2": 2}}
    with pytest.raises(ValueError, match="has a pending checkpoint after 4 tokens already"):
        allocator.take_pending_checkpoint(1, 4)
    assert allocator.keep_pending_checkpoint(1, 4) == states
    assert allocator.view().kept["mamba2"] == {2}
    allocator.take_pending_checkpoint(1, 5)
    allocator.take_pending_checkpoint(1, 6)
    assert allocator.take_pending_checkpoint(1, 2) is None
    allocator.drop_pending_checkpoint(1, 5)
    assert allocator.keep_current_states(1) == {"mamba2": 1}
    assert allocator.keep_current_states(1) is None
    allocator.check()
    allocator.release(1)
    assert allocator.view().references["mamba2"] == {1: 1, 2: 1}
