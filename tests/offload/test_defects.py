"""Defects in the books of the tier on the host, put in one at a time: a random engine must find each (S4-18, T-25)."""

import random

import jaxtyping
import pytest

from jaxkv.offload.swap_in import SwapIns
from jaxkv.offload.tier import HostTier
from tests.defects import Defects
from tests.offload.host_world import run_host_program
from tests.offload.test_machine import world_of

DEFECTS = Defects()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """There are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@DEFECTS
def places_are_published_before_they_are_filled(patch):
    take = SwapIns._take_places

    def publish(swaps, made, wanted):
        done = take(swaps, made, wanted)
        for name, key, position, page in made.pages if done else ():
            if swaps._pages.trees[name].add(key, page, position, 10**6):
                swaps._allocator.pool(name).keep(page)
        return done

    patch.setattr(SwapIns, "_take_places", publish)


@DEFECTS
def nobody_looks_again_before_the_index_gets_it(patch):
    patch.setattr(SwapIns, "_still_good", lambda *_: True)


@DEFECTS
def what_is_needed_on_the_host_may_go(patch):
    patch.setattr(HostTier, "pin", lambda *_: None)
    patch.setattr(HostTier, "unpin", lambda *_: None)


@DEFECTS
def bad_pages_stay_on_the_host(patch):
    patch.setattr(HostTier, "forget", lambda *_: None)


@DEFECTS
def what_rests_on_a_bad_page_stays(patch):
    forget = HostTier.forget

    def alone(tier, places):
        resting, tier._resting = tier._resting, {}
        try:
            forget(tier, places)
        finally:
            tier._resting = resting

    patch.setattr(HostTier, "forget", alone)


@DEFECTS
def a_checkpoint_leaves_without_its_tails(patch):
    offer = HostTier.offer_checkpoint

    def bare(tier, checkpoint):
        tails, checkpoint.tails = checkpoint.tails, {}
        try:
            return offer(tier, checkpoint)
        finally:
            checkpoint.tails = tails

    patch.setattr(HostTier, "offer_checkpoint", bare)


@DEFECTS
def more_than_the_budget_is_kept(patch):
    patch.setattr(HostTier, "_make_room", lambda *_: True)


@DEFECTS
def given_up_swap_ins_keep_their_places(patch):
    patch.setattr(SwapIns, "drop", lambda swaps, made: swaps._open.pop(made.number, None))


@DEFECTS
def a_checkpoint_of_the_host_matches_any_tail(patch):
    def along(kept, keys, tokens):
        found = []
        for full in range(len(tokens) // kept.page_size + 1):
            found += kept._after.get(keys.parent(tokens, kept.page_size, full), {}).values()
        return sorted((one for one in found if one.length <= len(tokens)), key=lambda o: -o.length)

    patch.setattr(HostTier, "along", lambda tier, *a: along(tier._checkpoints, *a))


def finds_nothing():
    try:
        for name in ("several", "hybrid", "mixed"):
            world = world_of(name)
            run_host_program(world, random.Random(7), 600)
    except (AssertionError, ValueError, KeyError, IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found(name, monkeypatch):
    DEFECTS[name](monkeypatch)
    assert not finds_nothing(), f"nobody noticed: {name}"


def test_nothing_is_found_where_there_is_no_defect():
    assert finds_nothing()
