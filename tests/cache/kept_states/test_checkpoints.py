"""Checkpoints of recurrent groups: order of eviction, pages that go with them, memory."""

import jaxtyping
import pytest

from jaxkv import CacheConfig
from jaxkv.cache.budget import checkpoint_bytes, checkpoints_in, plan_budget
from jaxkv.cache.page_allocator import Match
from jaxkv.cache.spec import ArraySpec, StateSpec, group_layers
from jaxkv.cache.variants import gqa, place
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.errors import OutOfStates
from tests.cache.kept_states.hybrid_world import HybridWorld, hybrid_of

ENDS = CheckpointPolicy(
    divergence=False, last_aligned=False, penultimate=False, end_of_generation=False
)
"""A prompt leaves one checkpoint, at its end."""


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def world_of(states=9, pages=12, checkpoints=3, policy=ENDS, sizes=((2, None),), groups=1):
    layout = hybrid_of(*sizes, groups=groups)
    counts = {group.name: {"page": pages, "state": states}[group.unit] for group in layout.groups}
    return HybridWorld(layout, counts, checkpoints=checkpoints, policy=policy)


def compute(world, text, salt=None):
    seq = world.adopt(text, salt)
    assert world.step(seq, len(text))
    world.collect(seq)
    world.check()
    return seq


def leave(world, *texts):
    for text in texts:
        world.release(compute(world, text))


def lengths(world):
    return sorted(one.length for one in world.index._states.kept)


def test_pages_and_states_are_matched_apart_and_the_states_decide():
    # Three pages and a state after the first: one page is skipped.
    world = world_of()
    leave(world, [0, 1], [0, 1, 0, 1, 1, 1])
    (one,) = [one for one in world.index._states.kept if one.length == 6]
    world.index._states.remove(one, 0)
    match = world.index.match([0, 1, 0, 1, 1, 1, 0], world.index.keys())
    assert (match.num_tokens, match.covered) == (2, {"group0": 6})
    assert len(match.pages["group0"]) == 3
    assert "no checkpoint after more than 2 of these tokens" in match.why
    world.check_matches([(None, [0, 1, 0, 1, 1, 1, 0])])


def test_a_hit_that_no_state_covers_cannot_be_made_up():
    # A match is refused without a state, and with one that is not kept.
    world = world_of()
    leave(world, [0, 1])
    page = next(iter(world.allocator.pool("group0").kept))
    for states in ({}, {"state0": 0}, {"state0": 5}):
        forged = Match(2, {"group0": (page,)}, {"group0": 0}, "", states)
        with pytest.raises(ValueError, match=r"skips 2 tokens, but the groups \['state0'\]"):
            world.allocator.adopt(77, forged)
    world.check()


def test_the_longest_unused_that_nobody_reads_goes_first():
    # Of three, the first is read, the second was used last.
    world = world_of()
    leave(world, [0, 0], [0, 1], [1, 1])
    world.adopt([0, 0, 1, 1])
    world.release(world.adopt([0, 1, 1]))
    leave(world, [1, 0])
    kept = {text for _, text in world.checkpoints()}
    assert kept == {(0, 0), (0, 1), (1, 0)}


def test_as_many_go_as_are_asked_for():
    # Of four, used in the order 3, 0, 2, 1, two go.
    world = world_of(checkpoints=4)
    texts = [[0, 0], [0, 1], [1, 0], [1, 1]]
    leave(world, *texts)
    for index in (3, 0, 2, 1):
        world.release(world.adopt([*texts[index], 0]))
    world.evict("state0", 2)
    assert {text for _, text in world.checkpoints()} == {(1, 0), (0, 1)}


def test_when_every_state_is_in_use_nothing_is_taken():
    # Units that a match pins do not count as room, in either of two groups.
    world = world_of(states=4, groups=2)
    leave(world, [0, 0, 1])
    one, other = (world.adopt([0, 0, 1, index]) for index in range(2))
    assert world.step(one, 4)
    # One state is written, one will be a checkpoint, and one is read by the other, which could write none.
    before = world.free()
    assert (before["state0"], before["state1"]) == (0, 0)
    with pytest.raises(OutOfStates, match=r"asked for 1 states of 'state0'.*only 0 of 3 are free"):
        world.allocator.reserve(other, 4)
    assert world.free() == before
    world.check()
    world.collect(one)
    world.release(one)
    assert world.step(other, 4)
    world.check()


def test_two_of_the_same_text_leave_one_checkpoint():
    # They end in one step, and one after the other.
    world = world_of()
    seqs = [world.adopt([0, 1, 1]) for _ in range(2)]
    free = world.allocator.num_free("state0")
    for seq in seqs:
        assert world.step(seq, 3)
    # A state for each, and one for the checkpoint.
    assert world.allocator.num_free("state0") == free - 3
    for seq in seqs:
        world.collect(seq)
        world.release(seq)
    leave(world, [0, 1, 1])
    assert lengths(world) == [3]
    world.check()


def test_checkpoints_come_and_go_without_a_trace():
    # A hundred times, the checkpoint that is found is the one that was left last.
    world = world_of()
    free = world.free()
    for _ in range(100):
        leave(world, [0, 1, 1])
        assert world.index.match([0, 1, 1, 0], world.index.keys()).num_tokens == 3
        world.clear()
        assert world.index.match([0, 1, 1, 0], world.index.keys()).num_tokens == 0
        assert world.free() == free


def test_a_page_takes_the_checkpoints_after_it_along():
    # The checkpoint's own page and its state are free again.
    world = world_of(pages=6)
    leave(world, [0, 1, 1])
    assert world.allocator.num_free("state0") == 7
    assert world.allocator.num_free("group0") == 4
    world.evict("group0", 1)
    assert lengths(world) == []
    assert world.allocator.num_free("state0") == 8
    assert world.allocator.num_free("group0") == 6


def test_states_go_without_the_pages():
    world = world_of()
    leave(world, [0, 1, 1, 0])
    world.evict("state0", 1)
    assert world.index.explain([0, 1, 1, 0, 0]).groups[0].pages_kept == 2
    assert world.index.explain([0, 1, 1, 0, 0]).num_reused == 0


@pytest.mark.parametrize(("most", "wanted"), [(8, 8), (7, 5), (5, 5), (4, 2), (1, 0)])
def test_a_shorter_hit_is_the_least_that_all_groups_allow(most, wanted):
    # A sequence that drops tokens goes back to a place that has both pages and states.
    world = world_of(checkpoints=4)
    text = [0, 1, 1, 0, 0, 1, 0, 1]
    leave(world, text[:2], text[:5], text)
    match = world.index.match([*text, 1], world.index.keys(), most=most)
    assert match.num_tokens == wanted


def test_what_a_sequence_makes_never_costs_it_what_it_made_before():
    # Places come in the order of a prompt, as many as there is room for.
    policy = CheckpointPolicy(grid=2, end_of_generation=False)
    world = world_of(checkpoints=1, policy=policy)
    leave(world, [0, 1, 1])
    assert lengths(world) == [2]
    assert world.index.stats.checkpoints_dropped == 1


def test_the_policy_is_data():
    everything = CheckpointPolicy(grid=4)
    assert everything.places(13, 6, 4) == (4, 12, 13)
    assert everything.places(12, 12, 4) == (8, 12)
    assert everything.places(3, 0, 4) == (3,)
    assert ENDS.places(13, 6, 4) == (13,)
    assert CheckpointPolicy(end_of_prompt=False).places(13, 6, 3) == (6, 12)
    assert CheckpointPolicy(end_of_prompt=False).places(65, 0, 64) == (64,)
    assert CheckpointPolicy(end_of_prompt=False).places(257, 0, 64) == (256,)
    with pytest.raises(ValueError, match="multiple of the model's chunk of 4 tokens, got 6"):
        CheckpointPolicy(grid=6).places(13, 6, 4)
    with pytest.raises(ValueError, match="number of checkpoints must be at least 0, got -1"):
        world_of(checkpoints=-1)


GIB = 2**30


def megatron():
    """The slot of the source's table: a convolution of 544 by 4 and a state of 8 by 64 by 16, in float32."""
    arrays = (ArraySpec("conv", (4, 544), "float32"), ArraySpec("ssm", (8, 64, 16), "float32"))
    attention = gqa(2, 8, dtype="float32", page_size=32)
    return group_layers(place([StateSpec("mamba2", arrays), attention]))


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (None, 0),
        (0, 0),
        (int(0.00005 * GIB), 1),
        (int(0.0001 * GIB), 2),
        (int(0.001 * GIB), 25),
        (int(0.01 * GIB), 258),
        (3 * 41472, 3),
        (3 * 41472 - 1, 2),
    ],
)
def test_a_budget_of_bytes_buys_whole_checkpoints(budget, count):
    layout = megatron()
    assert checkpoint_bytes(layout) == 41472
    assert checkpoints_in(layout, budget) == count
    plan = plan_budget(layout, None, max_sequences=4, max_tokens=64, checkpoints=count)
    assert plan.counts["mamba2"] == 4 + 1 + count


def test_budgets_that_keep_nothing_are_refused_with_the_bytes_that_would():
    with pytest.raises(ValueError, match="a checkpoint takes 41,472 bytes, got a budget of 1"):
        checkpoints_in(megatron(), 1)
    with pytest.raises(ValueError, match=r"checkpoint_bytes must be an int in \[0, .*got -5"):
        CacheConfig(checkpoint_bytes=-5)


def test_a_cache_without_recurrent_groups_is_as_it_was():
    layout = group_layers(place([gqa(2, 8, dtype="float32", page_size=32)]))
    assert checkpoints_in(layout, 10**6) == 0
    counts = {"max_sequences": 4, "max_tokens": 64}
    plans = [plan_budget(layout, None, **counts, checkpoints=n).counts for n in (0, 5)]
    assert plans[0] == plans[1]


def test_explain_tells_of_states():
    world = world_of()
    leave(world, [0, 1], [0, 1, 1, 0, 1])
    told = world.index.explain([0, 1, 1, 0, 1, 1, 1])
    assert (told.num_reused, told.checkpoints, told.recurrent) == (5, (2, 5), ("state0",))
    assert "state0: checkpoints after these numbers of tokens: 2, 5" in str(told)
