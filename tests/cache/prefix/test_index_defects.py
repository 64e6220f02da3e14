"""Defects that other projects shipped, seeded into pool, allocator and index one at a time: each must be found.

Each names what must find it: a test of a single operation, or in random programs a check of the records, a comparison
with the simulated device, or an exception of the code.
"""

import random

import jaxtyping
import pytest

from tests.cache.prefix import defects_of_allocator, defects_of_hits, defects_of_keeping
from tests.cache.prefix.world import FULL, MIXED, ODD, WINDOW, World, run_program

DEFECTS = defects_of_allocator.DEFECTS | defects_of_keeping.DEFECTS | defects_of_hits.DEFECTS
WORLDS = (
    (FULL, {"group0": 9}),
    (MIXED, {"group0": 9, "group1": 14, "sampling": 5}),
    (WINDOW, {"group0": 9}),
    (ODD, {"group0": 6, "group1": 11, "group2": 8}),
)
SCENES = {defect.scene for defect in DEFECTS.values() if defect.scene is not None}


def run_programs(seeds, num_operations=40):
    """Lets random engines work in each small world."""
    for seed in range(seeds):
        for layout, counts in WORLDS:
            run_program(World(layout, counts), random.Random(seed), num_operations)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_without_a_defect_nothing_is_found():
    for scene in SCENES:
        scene()
    run_programs(seeds=5)


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found_by_what_it_states(name, monkeypatch):
    DEFECTS[name].assert_found(monkeypatch, lambda: run_programs(seeds=60))
