"""Random programs over two tiers: host entries are correct and complete, swap-ins are atomic, and bytes stay in budget.

`host_world.py` checks its invariants after each operation.
"""

import random

import jaxtyping
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.cache.kept_states.hybrid_world import hybrid_of
from tests.cache.kept_states.test_keeper_machine import HybridMachine
from tests.cache.prefix.test_index_machine import with_settings
from tests.cache.prefix.world import FULL, MIXED
from tests.fast_cases import fast_cases
from tests.offload.host_world import HostWorld, run_host_program

WORLDS = {
    "full": (FULL, {"group0": 7}, 60),
    "mixed": (MIXED, {"group0": 8, "group1": 14, "sampling": 5}, 90),
    "hybrid": (hybrid_of((2, None)), {"group0": 9, "state0": 9, "sampling": 7}, 120),
    "several": (
        hybrid_of((4, None), (3, 5), groups=2),
        {"group0": 9, "group1": 12, "state0": 8, "state1": 8, "sampling": 7},
        250,
    ),
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def world_of(name):
    layout, counts, host_bytes = WORLDS[name]
    return HostWorld(layout, counts, host_bytes=host_bytes)


class TierMachine(HybridMachine):
    """Every verb of both tiers in any order."""

    name = "hybrid"

    def __init__(self):
        RuleBasedStateMachine.__init__(self)
        self.world = world_of(self.name)
        self.probes = []

    @precondition(lambda self: self.probes)
    @rule(data=st.data())
    def begin(self, data):
        salt, text = data.draw(st.sampled_from(self.probes))
        if len(self.world.coming) < 3:
            self.world.begin(text, salt)

    @precondition(lambda self: self.probes)
    @rule(data=st.data())
    def fetch(self, data):
        salt, text = data.draw(st.sampled_from(self.probes))
        self.world.fetch(text, salt)

    @precondition(lambda self: self.world.coming)
    @rule(count=st.integers(1, 4))
    def move(self, count):
        self.world.move(count)

    @precondition(lambda self: self.world.coming)
    @rule()
    def land(self):
        self.world.land()

    @precondition(lambda self: self.world.coming)
    @rule()
    def give_up(self):
        self.world.give_up()

    @rule(seed=st.integers(0, 99))
    def spoil(self, seed):
        self.world.spoil(random.Random(seed))

    @rule(really=st.integers(0, 3))
    def lose(self, really):
        if really == 0:
            self.world.lose()


def machine_of(name):
    return with_settings(type(f"Tiers_{name}", (TierMachine,), {"name": name}), most=12, steps=30)


TestMixed = machine_of("mixed")
TestHybrid = machine_of("hybrid")
TestSeveral = machine_of("several")


# Worlds of several groups are fast; full attention and recurrent layers are among these.
@pytest.mark.parametrize("name", fast_cases(WORLDS, "several", "mixed"))
def test_long_random_programs_keep_every_promise(name):
    world = world_of(name)
    run_host_program(world, random.Random(5), 1500)
    stats = world.tier.stats
    assert world.landed >= 10
    assert min(stats.evictions, stats.hits, world.index.stats.evictions) >= 10
