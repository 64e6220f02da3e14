"""Defects that others shipped, put into pool, allocator and index one at a time: each must be found.

A defect is found when a random engine or one of a few scenes trips over it: the books' own checks, or the comparison
with what the played device holds.
"""

import random

import jaxtyping
import pytest

from tests.cache import (
    defects_of_allocator,
    defects_of_hits,
    defects_of_keeping,
    test_prefix_ends,
    test_prefix_eviction,
    test_prefix_groups,
    test_prefix_keys,
)
from tests.cache.prefix_world import FULL, MIXED, ODD, WINDOW, World, run_program

DEFECTS = defects_of_allocator.DEFECTS | defects_of_keeping.DEFECTS | defects_of_hits.DEFECTS
WORLDS = (
    (FULL, {"group0": 9}),
    (MIXED, {"group0": 9, "group1": 14, "sampling": 5}),
    (WINDOW, {"group0": 9}),
    (ODD, {"group0": 6, "group1": 11, "group2": 8}),
)
SCENES = (
    test_prefix_eviction.test_only_leaves_go_the_longest_unused_first,
    test_prefix_eviction.test_a_use_saves_a_page_from_eviction,
    test_prefix_ends.test_a_sequence_that_began_before_a_clear_publishes_nothing,
    test_prefix_keys.test_different_texts_have_different_keys,
    test_prefix_ends.test_counts_are_exact_on_a_scripted_trace,
    test_prefix_groups.test_recurrent_groups_skip_nothing_without_a_checkpoint,
    test_prefix_eviction.test_a_sequence_alone_is_never_kept_waiting_by_its_own_hit,
    test_prefix_eviction.test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it,
    test_prefix_groups.test_a_window_needs_only_what_the_next_token_sees,
    test_prefix_groups.test_pages_before_every_window_go_first,
    test_prefix_eviction.test_a_page_computed_again_counts_as_used,
)


def finds_nothing(seeds=5, num_operations=40):
    """Whether a random engine in each small world and every scene get through. Errors of the defect's own pass on."""
    try:
        for scene in SCENES:
            scene()
        for seed in range(seeds):
            for layout, counts in WORLDS:
                run_program(World(layout, counts), random.Random(seed), num_operations)
    except (AssertionError, ValueError, RuntimeError):
        return False
    return True


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_without_a_defect_nothing_is_found():
    assert finds_nothing()


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found(name, monkeypatch):
    DEFECTS[name](monkeypatch)
    assert not finds_nothing(seeds=60), f"nobody noticed: {name}"
