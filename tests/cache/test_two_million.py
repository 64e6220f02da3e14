"""Two million random operations on allocator and index, with all invariants checked after each.

Eleven configurations (page sizes, windows, several groups, recurrent states, two tiers), each from twenty seeds. The
simulated devices and their invariants are those of `prefix/`, `kept_states/` and `tests/offload`.
"""

import random
from collections import Counter

import jaxtyping
import pytest

from tests.cache.kept_states import test_keeper_machine as hybrids
from tests.cache.kept_states.hybrid_world import HybridWorld, run_hybrid_program
from tests.cache.prefix import test_index_machine as prefixes
from tests.cache.prefix.world import World, run_program
from tests.offload import test_machine as hosts
from tests.offload.host_world import run_host_program

OPERATIONS, SEEDS = 2_000_000, range(20)
LEAST_VISITS = 1000
MACHINES = {
    "full": prefixes.PrefixMachine,
    "window": prefixes.WindowMachine,
    "mixed": prefixes.MixedMachine,
    "odd": prefixes.OddMachine,
    "inside": prefixes.InsideMachine,
}
WORLDS = (
    dict.fromkeys(MACHINES, (run_program, "index"))
    | {f"hybrid {name}": (run_hybrid_program, "states") for name in hybrids.WORLDS}
    | {f"host {name}": (run_host_program, "tier") for name in ("mixed", "several")}
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def world_of(name):
    kind, _, rest = name.partition(" ")
    if name == "hybrid pure":  # With fewer states than it has elsewhere, so that they run out.
        return HybridWorld(hybrids.WORLDS[rest][0], {"state0": 7, "sampling": 7})
    if kind in MACHINES:
        return World(MACHINES[kind].layout, MACHINES[kind].counts)
    return (hybrids if kind == "hybrid" else hosts).world_of(rest)


def watched(world, visits):
    """Counts what a random program does to a world, and each step that there was no room for.

    Of the texts that are looked up after each operation, which take as long as all the rest, one is left.
    """

    def counting(name, verb):
        def count(*args, **kwargs):
            result = verb(*args, **kwargs)
            visits[name] += 1
            visits["no room"] += name == "step" and not result
            return result

        return count

    for name in ("adopt", "step", "collect", "release", "fork", "fail", "evict"):
        setattr(world, name, counting(name, getattr(world, name)))
    check_matches = world.check_matches
    world.check_matches = lambda probes: check_matches(probes[-1:])
    return world


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_two_million_operations_break_no_promise(name):
    """No check fails, and each kind of state of the books is visited often."""
    run, part = WORLDS[name]
    visits = Counter()
    for seed in SEEDS:
        world = watched(world_of(name), visits)
        run(world, random.Random(seed), OPERATIONS // len(WORLDS) // len(SEEDS) + 1)
        stats = world.index.stats
        visits += Counter(hits=stats.hits, misses=stats.misses, evictions=stats.evictions)
        if part == "states":
            visits += Counter(checkpoints=stats.checkpoints, dropped=stats.checkpoint_evictions)
        elif part == "tier":
            tier = world.tier.stats
            visits += Counter({"host hits": tier.hits, "host evictions": tier.evictions})
    if part == "tier":  # What moves to the host leaves room nearly always.
        assert visits.pop("no room") >= LEAST_VISITS // 2
    assert min(visits.values()) >= LEAST_VISITS, visits
