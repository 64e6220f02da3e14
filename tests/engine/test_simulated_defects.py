"""Defects put into the engine, the cache's books and the packer one at a time: the simulated device finds each.

A defect is found when a random program reads the text of another, gets other tokens than the oracle's, or has books
that contradict themselves.
"""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache import sequence_pages
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix import hits as prefix_hits
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.collect import Collector
from jaxkv.offload.transfers import HostTransfers
from jaxkv.runner.model_runner import Executor
from jaxkv.runner.packer import Packer
from tests.defects import wrap
from tests.engine.simulated import SimulatedDevice
from tests.engine.simulated_engines import KINDS, draw_setting
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import Play

QUIET = {"fault_rate": 0.0, "broken_every": 0}
DEFECTS = {}


def defect(*kinds, **fixed):
    """Registers a defect, the kinds of cache that it concerns, and the settings in which it shows soon."""

    def register(function):
        DEFECTS[function.__name__] = function, kinds or KINDS, QUIET | fixed
        return function

    return register


def finds_nothing(kinds, fixed, seeds):
    """Whether all random programs get through; errors that nothing of the engine raises pass on."""
    try:
        for seed in range(seeds):
            for kind in kinds:
                draw = random.Random(f"{kind} {seed}")
                Play(draw, draw_setting(draw, kind, **fixed), 6).run()
    except (AssertionError, ValueError, RuntimeError, LookupError):
        return False
    return True


def repack(patch, change):
    """Changes the int32 fields of every step that is packed; `change(shape, fields, count)` does it."""

    def make(pack):
        def changed(self, shape, rows, allocator):
            ints, floats = pack(self, shape, rows, allocator)
            fields = self.arrangements(shape)[0].split(ints)
            change(shape, fields, np.count_nonzero(fields["seq_lens"]))
            return ints, floats

        return changed

    wrap(patch, Packer, "pack", make)


@pytest.fixture(autouse=True)
def simulated(monkeypatch, caplog):
    put_caches_on_device(monkeypatch)
    caplog.set_level(logging.CRITICAL)


# Steps.


@defect("full", steps=8, page=4, budget=40, prefix=False)
def a_burst_goes_on_for_a_step_too_long(patch):
    def change(shape, fields, count):
        if shape.steps > 1:
            fields["left"][:count] += 1

    repack(patch, change)


@defect("full", "windows")
def a_slot_is_used_twice(patch):
    """Two rows write their tokens to one entry of the sampling group."""

    def change(shape, fields, count):
        fields["slots"][:count] = fields["slots"][:count].min()

    repack(patch, change)


@defect("full", overlap=True)
def a_row_takes_the_token_that_the_host_last_knew(patch):
    """A decode step that is sent before the last one was read."""

    def change(shape, fields, count):
        fields["carry"][:count] = 0

    repack(patch, change)


@defect("hybrid", prefix=True)
def a_state_is_kept_a_token_early(patch):
    """The checkpoint and its pages then are of different texts."""

    def change(shape, fields, count):
        if shape.snapshots:
            fields["snapshot_ends"] -= fields["snapshot_ends"] > 1

    repack(patch, change)


@defect("hybrid", prefix=True, checkpoint_bytes=2**22)
def tokens_in_pages_of_others_are_written_again(patch):
    """What is computed again for its states alone goes to a page that the index holds."""

    def write_slots(device, fields, group, row, positions, places, turn):
        return device.slots_by_table(fields, group, row, positions)

    patch.setattr(SimulatedDevice, "write_slots", write_slots)


# Pages and states.


@defect("windows", "all windows", page=4)
def a_window_gives_a_page_back_too_early(patch):
    """The next token still sees it."""
    wrap(
        patch,
        sequence_pages,
        "first_page",
        lambda first: lambda group, length: first(group, length) + 1,
    )


@defect("windows", prefix=True)
def a_hit_is_a_token_too_long(patch):
    """The skipped tokens include one that is not cached."""

    def make(longest):
        return lambda lookups, limit: min(limit, longest(lookups, limit) + 1)

    wrap(patch, prefix_hits, "longest", make)


@defect("full", prefix=True)
def shared_pages_are_not_copied(patch):
    """The page is replaced, its contents are not."""
    patch.setattr(Executor, "copy", lambda executor, copies: None)


@defect("full")
def a_table_is_not_written_anew_when_it_grows(patch):
    """The packer's own copy of a table is stale."""

    def make(reserve):
        def unnoticed(books, seq, num_tokens, **options):
            held = books._held[seq]
            before = held.changes
            reservation = reserve(books, seq, num_tokens, **options)
            held.changes = before
            return reservation

        return unnoticed

    wrap(patch, PageAllocator, "reserve", make)


@defect("full", "hybrid", prefix=True, fault_rate=0.04, host_bytes=0)
def the_index_survives_a_lost_cache(patch):
    """The pages that it names are gone."""
    patch.setattr(PrefixIndex, "clear", lambda index: None)


@defect("hybrid", prefix=True, checkpoint_bytes=2**22)
def rows_begin_from_the_state_of_another(patch):
    """The skipped prefix and the restored state are of different lengths."""

    def change(shape, fields, count):
        for name in fields:
            if name.endswith("read_states"):
                fields[name][:count] = fields[name][:count].max()

    repack(patch, change)


# The host tier.


@defect("full", "windows", prefix=True, host_bytes=2**22, spare=1, page=4)
def a_swap_in_lands_before_its_bytes(patch):
    patch.setattr(HostTransfers, "advance", lambda transfers, inbound, wait=False: True)


@defect("full", "windows", prefix=True, host_bytes=2**22, spare=1, page=4)
def a_page_goes_to_the_host_after_it_was_written_over(patch):
    patch.setattr(Executor, "_flush", lambda executor: None)


# Results.


@defect("full", overlap=True, spare=0)
def results_of_an_old_epoch_count(patch):
    """A step that was under way when its sequence was preempted is counted all the same."""

    def make(collect):
        def trusting(collector, flight, steps):
            epochs = tuple(part.sequence.epoch for part in flight.parts)
            return collect(collector, replace(flight, epochs=epochs), steps)

        return trusting

    wrap(patch, Collector, "collect", make)


@defect("full", rows=5, spare=0, page=4, budget=16)
def who_comes_back_forgets_what_it_has_generated(patch):
    """Penalties count the output of before a preemption."""
    wrap(patch, Executor, "admit", lambda admit: lambda executor, rows, _=(): admit(executor, rows))


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found(name, monkeypatch):
    put, kinds, fixed = DEFECTS[name]
    put(monkeypatch)
    assert not finds_nothing(kinds, fixed, seeds=40), f"nobody noticed: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_without_the_defect_nothing_is_found(name):
    """The same programs get through when nothing was put in, so it is the defect that is found."""
    _, kinds, fixed = DEFECTS[name]
    assert finds_nothing(kinds, fixed, seeds=5)
