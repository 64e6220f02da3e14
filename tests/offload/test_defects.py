"""Defects seeded into the records of the host tier one at a time: a random engine must find each."""

import random

import jaxtyping
import pytest

from jaxkv.errors import CorruptBooks
from jaxkv.offload.swap_in import SwapIns
from jaxkv.offload.tier import HostTier
from tests.defects import Defects
from tests.fast_cases import fast_cases
from tests.offload.host_world import run_host_program
from tests.offload.test_machine import world_of

DEFECTS = Defects()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """There are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@DEFECTS(
    AssertionError, "a place that others may read is filled|kept before its step|was not computed"
)
def places_are_published_before_they_are_filled(patch):
    take = SwapIns._take_units

    def publish(swaps, made, wanted):
        done = take(swaps, made, wanted)
        for name, key, position, page in made.pages if done else ():
            if swaps._pages.trees[name].add(key, page, position, 10**6):
                swaps._allocator.pool(name).keep(page)
        return done

    patch.setattr(SwapIns, "_take_units", publish)


@DEFECTS(CorruptBooks)
def nobody_looks_again_before_the_index_gets_it(patch):
    patch.setattr(SwapIns, "_is_valid", lambda *_: True)


@DEFECTS(AssertionError, "pins and swap-ins do not agree")
def what_is_needed_on_the_host_may_go(patch):
    patch.setattr(HostTier, "pin", lambda *_: None)
    patch.setattr(HostTier, "unpin", lambda *_: None)


@DEFECTS(AssertionError, "of a failed sequence is still on the host")
def bad_pages_stay_on_the_host(patch):
    patch.setattr(HostTier, "remove", lambda *_: None)


@DEFECTS(AssertionError, "follows one of a failed sequence is still on the host")
def what_rests_on_a_bad_page_stays(patch):
    def alone(tier, places):
        for entry in [tier._entries[place] for place in places if place in tier._entries]:
            tier._drop(entry)

    patch.setattr(HostTier, "remove", alone)


@DEFECTS(AssertionError, "both tiers find")
def a_checkpoint_leaves_without_its_tails(patch):
    offer = HostTier.offer_checkpoint

    def bare(tier, checkpoint):
        tails, checkpoint.tails = checkpoint.tails, {}
        try:
            return offer(tier, checkpoint)
        finally:
            checkpoint.tails = tails

    patch.setattr(HostTier, "offer_checkpoint", bare)


@DEFECTS(CorruptBooks)
def more_than_the_budget_is_kept(patch):
    patch.setattr(HostTier, "_make_room", lambda *_: True)


@DEFECTS(AssertionError, "holds its places|neither free nor held|refused changed something")
def given_up_swap_ins_keep_their_places(patch):
    patch.setattr(SwapIns, "release", lambda swaps, made: swaps._open.pop(made.number, None))


@DEFECTS(AssertionError, "both tiers find")
def a_checkpoint_of_the_host_matches_any_tail(patch):
    def along(kept, keys, tokens):
        found = []
        for full in range(len(tokens) // kept.page_size + 1):
            found += kept._after.get(keys.parent(tokens, kept.page_size, full), {}).values()
        return sorted((one for one in found if one.length <= len(tokens)), key=lambda o: -o.length)

    patch.setattr(HostTier, "along", lambda tier, *a: along(tier._checkpoints, *a))


def run_programs():
    """Lets a random engine work over both tiers in several worlds."""
    for name in ("several", "hybrid", "mixed"):
        run_host_program(world_of(name), random.Random(7), 600)


# Found late, by random programs of which each takes a second.
LATE = ("what_rests_on_a_bad_page_stays",)


@pytest.mark.parametrize("name", fast_cases(DEFECTS, *(set(DEFECTS) - set(LATE))))
def test_every_defect_is_found_by_what_it_states(name, monkeypatch):
    DEFECTS[name].assert_found(monkeypatch, run_programs)


# test_machine.py has such programs under another seed.
@pytest.mark.slow
def test_nothing_is_found_where_there_is_no_defect():
    run_programs()
