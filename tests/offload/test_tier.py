"""The records of the host tier, one operation at a time."""

import jaxtyping
import pytest

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.offload.swap_in import attach_host
from jaxkv.offload.tier import HostTier
from tests.cache.kept_states.hybrid_world import hybrid_of
from tests.cache.prefix.world import FULL
from tests.offload.host_world import HostWorld

PAGE_BYTES = 6
HYBRID = hybrid_of((2, None))
HYBRID_COUNTS = {"group0": 9, "state0": 9, "sampling": 7}
TEXT = (0, 1, 1, 0, 1, 0, 0, 1)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """There are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def serve(world, text, salt=None):
    """Computes a text to its end."""
    seq = world.adopt(text, salt)
    assert world.step(seq, len(text))
    world.collect(seq)
    world.end(seq)


def evict_all(world):
    for name in (*world.memory, *world.states):
        world.evict(name, world.allocator.pool(name).num_idle)
    world.flush()
    world.check()


def full_world(pages=4, host_bytes=60):
    return HostWorld(FULL, {"group0": pages}, host_bytes=host_bytes)


def test_evicted_pages_still_match_and_come_back():
    # A page goes from the device to the host and back.
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    told = world.index.explain(TEXT)
    assert (told.num_reused, told.num_with_host, told.groups[0].pages_on_host) == (0, 7, 4)
    assert "with pages on the host: 7 tokens" in str(told)
    assert "and 4 on the host" in str(told)
    world.fetch(TEXT, None)
    told = world.index.explain(TEXT)
    assert (told.num_reused, told.num_with_host, told.groups[0].pages_on_host) == (7, 7, 0)
    world.adopt(TEXT)
    world.check()


def test_nothing_is_moved_for_a_checkpoint_that_no_room_could_be_made_for():
    """Two million random operations found this: the largest number of checkpoints was in transfer."""
    counts = {"group0": 12, "state0": 9, "sampling": 7}
    world = HostWorld(HYBRID, counts, host_bytes=120, checkpoints=1)
    serve(world, TEXT)
    evict_all(world)
    more = (1, 1, *TEXT)
    other = world.adopt(more)
    assert world.step(other, len(more))
    assert world.taken[other]
    asked = (*TEXT, 0)
    assert not world.begin(asked, None)
    world.check()
    world.collect(other)
    # Done, it is one that may be given up.
    world.fetch(asked, None)
    assert world.landed == 1


def test_without_a_host_nothing_is_told_of_one():
    index = PrefixIndex(FULL, PageAllocator(FULL, {"group0": 4}))
    assert index.explain(TEXT).num_with_host is None
    assert "host" not in str(index.explain(TEXT))


def test_only_what_the_device_lacks_is_moved():
    world = full_world()
    serve(world, TEXT)
    world.evict("group0", 2)
    world.flush()
    assert world.begin(TEXT, None)
    assert [move.group for move in world.coming[0][1]] == ["group0"] * 2
    world.move(9)
    world.land(at_once=True)


def test_what_the_device_has_of_it_stays_while_the_rest_comes():
    world = full_world(pages=6, host_bytes=100)
    serve(world, TEXT)
    world.evict("group0", 2)
    serve(world, (1, 1, 1, 1, 1, 1))
    # Nothing is free, and what it needs is the longest unused.
    assert world.free() == {"group0": 1}
    world.fetch(TEXT, None)
    assert world.landed == 1
    assert world.index.match(TEXT, world.index.keys()).num_tokens == 7


def test_a_checkpoint_whose_step_was_not_read_does_not_leave():
    world = HostWorld(HYBRID, HYBRID_COUNTS, host_bytes=200)
    serve(world, TEXT[:4])
    for one in world.index._states.kept:
        assert one.confirmed
        one.confirmed = False
        assert not world.tier.offer_checkpoint(one)
        one.confirmed = True
        assert world.tier.offer_checkpoint(one)


def test_what_lies_on_the_host_is_not_written_there_twice():
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    before = dict(world.host)
    world.fetch(TEXT, None)
    evict_all(world)
    assert world.host.keys() == before.keys()


def test_a_swap_in_for_which_there_is_no_room_changes_nothing():
    # The result is None, and nothing changes.
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    seq = world.adopt((1, 1, 0, 0), None)
    assert world.step(seq, 4)
    free = world.free()
    assert not world.begin(TEXT, None)
    assert world.free() == free
    assert world.tier.stats.entries == 4
    world.release(seq)
    assert world.begin(TEXT, None)


def test_pages_that_another_computed_meanwhile_are_wasted_and_free_again():
    # The caller learns which ids are duplicates.
    world = full_world(pages=12, host_bytes=100)
    serve(world, TEXT)
    evict_all(world)
    assert world.begin(TEXT, None)
    serve(world, TEXT)
    world.move(9)
    made = world.coming.pop()[0]
    wasted = world.swaps.land(made)
    assert [move.unit for move in wasted] == [move.unit for move in made.moves]
    assert world.free() == {"group0": 8}
    assert world.tier.stats.wasted == 4
    world.check()


def test_the_budget_holds_to_the_byte_and_the_longest_unused_goes_first():
    for host_bytes, pages in ((17, 2), (18, 3), (19, 3)):
        world = full_world(host_bytes=host_bytes)
        serve(world, TEXT)
        evict_all(world)
        stats = world.tier.stats
        assert (stats.entries, stats.used_bytes) == (pages, pages * PAGE_BYTES)
        # The last of the text left first, and was the first to go.
        assert world.index.explain(TEXT).num_with_host == 2 * pages


def test_what_is_larger_than_the_budget_is_refused_and_costs_nobody():
    world = HostWorld(HYBRID, HYBRID_COUNTS, host_bytes=7)
    serve(world, TEXT[:4])
    evict_all(world)
    stats = world.tier.stats
    assert stats.refused >= 1
    assert (stats.entries, stats.used_bytes) == (1, PAGE_BYTES)
    assert not world.host_checkpoints()


def test_pinned_entries_stay_while_they_come_back():
    world = full_world(pages=8, host_bytes=4 * PAGE_BYTES)
    serve(world, TEXT)
    evict_all(world)
    assert world.begin(TEXT, None)
    serve(world, (1, 1, 1, 1))
    world.evict("group0", 2)
    assert world.tier.stats.refused == 2
    world.move(9)
    world.land(at_once=True)
    assert world.index.match(TEXT, world.index.keys()).num_tokens == 7


def test_a_checkpoint_comes_with_its_pages_and_states_or_not_at_all():
    world = HostWorld(HYBRID, HYBRID_COUNTS, host_bytes=200)
    text = TEXT[:5]
    serve(world, text)
    evict_all(world)
    assert world.host_checkpoints().keys() == {(None, text)}
    assert world.begin((*text, 1), None)
    moved = sorted(move.group for move in world.coming[0][1])
    # Two full pages, the page that the text ends inside, and the state.
    assert moved == ["group0", "group0", "group0", "state0"]
    world.move(3)
    world.land()
    assert not world.checkpoints()
    assert not any(world.all_kept().values())
    world.move(1)
    world.land(at_once=True)
    assert world.index.match((*text, 1), world.index.keys()).num_tokens == 5


def test_a_checkpoint_leaves_with_the_pages_it_rests_on():
    world = HostWorld(HYBRID, HYBRID_COUNTS, host_bytes=200)
    serve(world, TEXT[:4])
    evict_all(world)
    world.fetch((*TEXT[:4], 1), None)
    (kept,) = world.checkpoints().values()
    assert kept.length == 4
    world.evict("group0", 2)
    assert not world.checkpoints()
    world.flush()
    pages = [entry for entry in world.tier._entries.values() if entry.key[0]]
    states = [entry for entry in world.tier._entries.values() if not entry.key[0]]
    assert (len(pages), len(states)) == (2, 1)


def test_a_spoilt_part_spoils_the_whole():
    # A transfer failed for one of its parts.
    world = HostWorld(HYBRID, HYBRID_COUNTS, host_bytes=200)
    serve(world, TEXT[:5])
    evict_all(world)
    assert world.begin((*TEXT[:5], 1), None)
    made = world.coming[0][0]
    state = next(move for move in made.moves if move.group == "state0")
    world.tier.discard([state.handle])
    world.move(9)
    (one,) = world.coming
    world.coming.clear()
    assert world.swaps.land(one[0]) is None
    assert not world.checkpoints()
    world.check()
    assert world.free() == HYBRID_COUNTS | {"state0": 8, "sampling": 6}


def test_what_may_follow_a_page_of_a_failed_sequence_leaves_the_host_though_a_page_between_is_gone():
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    second = next(entry for entry in world.tier if entry.kept.index == 1)
    world.tier.discard(second.parts.values())
    seq = world.adopt(TEXT[:3])
    assert world.step(seq, 3)
    world.collect(seq)
    world.fail(seq)
    assert not len(world.tier)
    world.check()


def test_what_only_the_device_reaches_stays_on_the_host_when_another_sequence_fails():
    world = full_world(pages=6)
    serve(world, TEXT)
    evict_all(world)
    first = next(entry for entry in world.tier if entry.kept.index == 0)
    world.tier.discard(first.parts.values())
    serve(world, TEXT[:3])
    seq = world.adopt((1, 1, 1))
    assert world.step(seq, 3)
    world.collect(seq)
    world.fail(seq)
    assert {entry.kept.index for entry in world.tier} == {1, 2, 3}
    world.check()


def test_a_lost_cache_costs_only_what_had_not_left_it():
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    serve(world, (1, 1))
    world.index.reclaim({"group0": 4}, {})
    world.lose()
    world.fetch(TEXT, None)
    assert world.index.match(TEXT, world.index.keys()).num_tokens == 7


def test_departures_of_a_lost_cache_are_forgotten():
    tier = HostTier(FULL, 60, page_size=2)
    world = full_world()
    serve(world, TEXT)
    for node in world.index._trees["group0"]:
        assert tier.offer_page("group0", node)
    tier.check()
    tier.lose_device()
    assert (len(tier), tier.departures(), tier.freed()) == (0, [], [])


def test_an_index_has_one_lower_tier_until_it_is_detached():
    index = PrefixIndex(FULL, PageAllocator(FULL, {"group0": 4}))
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        attach_host(index, 0)
    swaps = attach_host(index, 64)
    with pytest.raises(ValueError, match="has a lower tier already; detach it first"):
        attach_host(index, 65)
    index.detach_lower_tier()
    index.detach_lower_tier()
    assert attach_host(index, 65) is not swaps


def test_corrupt_books_are_noticed():
    world = full_world()
    serve(world, TEXT)
    evict_all(world)
    world.tier.used += 1
    with pytest.raises(
        ValueError, match="the host tier is corrupt: entries have 24 bytes, counted as 25"
    ):
        world.tier.check()
