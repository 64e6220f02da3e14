"""Defects seeded into the engine, the cache's records and the packer one at a time: the simulated device finds each.

Each states what must find it: a read or write of another request's page, an output that is not the oracle's, a check
of the records, or an exception of the engine.
"""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache import sequence_pages
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix import hits as prefix_hits
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.collect import Collector
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.speculation import speculation
from jaxkv.engine.step_pipeline import StepPipeline
from jaxkv.engine.steps.in_flight import UnsampledStep
from jaxkv.offload.transfers import HostTransfers
from jaxkv.runner.packer import Packer
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.structured.grammar import TokenConstraint
from tests.defects import Defects, wrap
from tests.engine.simulated import WrongUse
from tests.engine.simulated_engines import KINDS, draw_setting
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import Play, WrongOutput, WrongProgress
from tests.engine.simulated_requests import GRAMMAR, WISHES
from tests.fast_cases import fast_cases

GUESSED = {"drafts": 3, "rightness": 0.6, "budget": 40, "prefix": True, "overlap": True}
FOLLOWED = GUESSED | {"on_device": True, "spare": None}
"""Steps that verify drafts follow one another before these are counted."""

QUIET = {"fault_rate": 0.0, "broken_every": 0}
DEFECTS = Defects()
SETTINGS = {}

OTHERS = "other records are read|the text of another"
"""A row reads places that do not hold its own text."""


def defect(kind, message=None, *, caches=KINDS, wishes=WISHES, **fixed):
    """Registers a defect, the error that must find it, and what it shows soon in: caches, requests and settings."""

    def register(function):
        SETTINGS[function.__name__] = caches, wishes, QUIET | fixed
        return DEFECTS(kind, message)(function)

    return register


def play(caches, wishes, fixed, seeds):
    for seed in range(seeds):
        for kind in caches:
            draw = random.Random(f"{kind} {seed}")
            Play(draw, draw_setting(draw, kind, **fixed), 6, wishes).run()


def repack(patch, change):
    """Changes the int32 fields of every step that is packed; `change(shape, fields, count)` does it."""

    def make(pack):
        def changed(self, shape, rows, allocator):
            ints, floats = pack(self, shape, rows, allocator)
            fields = self.packed_layout.arrangements(shape)[0].split(ints)
            change(shape, fields, np.count_nonzero(fields["seq_lens"]))
            return ints, floats

        return changed

    wrap(patch, Packer, "pack", make)


def remask(patch, change):
    """Changes what mask each row of a step has; `change(spec, mask_of_row)` does it."""

    def make(pack_masks):
        def changed(self, spec, masks):
            packed = pack_masks(self, spec, masks)
            fields = self.packed_layout.mask_arrangement(spec).split(packed)
            change(spec, fields["mask_of_row"][: len(masks)])
            return packed

        return changed

    wrap(patch, Packer, "pack_masks", make)


@pytest.fixture(autouse=True)
def simulated(monkeypatch, caplog):
    put_caches_on_device(monkeypatch)
    caplog.set_level(logging.CRITICAL)


# Steps.


@defect(WrongUse, OTHERS + "|is written", caches=["full"], steps=8, page=4, budget=40, prefix=False)
def a_multi_step_program_goes_on_for_a_step_too_long(patch):
    def change(shape, fields, count):
        if shape.steps > 1:
            fields["left"][:count] += 1

    repack(patch, change)


@defect(WrongUse, "are written twice", caches=["full", "windows"])
def a_slot_is_used_twice(patch):
    """Two rows write their tokens to one entry of the sampling group."""

    def change(shape, fields, count):
        fields["sampling_states"][:count] = fields["sampling_states"][:count].min()

    repack(patch, change)


@defect(WrongOutput, caches=["full"], overlap=True)
def a_row_takes_the_token_that_the_host_last_knew(patch):
    """A decode step that is sent before the last one was read."""

    def change(shape, fields, count):
        fields["carry"][:count] = 0

    repack(patch, change)


@defect(WrongUse, "is after .* tokens", caches=["hybrid"], prefix=True)
def a_state_is_kept_a_token_early(patch):
    """The checkpoint and its pages then are of different texts."""

    def change(shape, fields, count):
        if shape.pending_checkpoints:
            ends = fields["snapshot_ends"]
            ends -= (ends > 1) & (ends <= shape.tokens)

    repack(patch, change)


@defect(WrongUse, "hold, is written", caches=["hybrid"], prefix=True, checkpoint_bytes=2**22)
def tokens_in_pages_of_others_are_written_again(patch):
    """The packer sends tokens that are computed again for their states alone to pages that the index holds."""

    def make(fill):
        def everywhere(packer, group, *step):
            packer._row_table.covered[group.name][:] = 0
            fill(packer, group, *step)

        return everywhere

    wrap(patch, Packer, "_fill_pages", make)


# Pages and states.


@defect(WrongUse, OTHERS, caches=["windows", "all windows"], page=4)
def a_window_gives_a_page_back_too_early(patch):
    """The next token still sees it."""
    wrap(
        patch,
        sequence_pages,
        "first_page",
        lambda first: lambda group, length: first(group, length) + 1,
    )


@defect(ValueError, "a match of .* look it up again", caches=["windows"], prefix=True)
def a_hit_is_a_token_too_long(patch):
    """The skipped tokens include one that is not cached."""

    def make(longest):
        return lambda lookups, limit: min(limit, longest(lookups, limit) + 1)

    wrap(patch, prefix_hits, "longest", make)


@defect(WrongUse, OTHERS, caches=["full"], prefix=True)
def shared_pages_are_not_copied(patch):
    """The page is replaced, its contents are not."""
    patch.setattr(SequenceRunner, "copy", lambda sequence_runner, copies: None)


@defect(ValueError, "do not hold .* reserve pages first", caches=["full"])
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


@defect(
    WrongUse,
    OTHERS + "|is after .* tokens",
    caches=["full", "hybrid"],
    prefix=True,
    fault_rate=0.04,
    host_bytes=0,
)
def the_index_survives_a_lost_cache(patch):
    """The pages that it names are gone."""
    patch.setattr(PrefixIndex, "clear", lambda index: None)


@defect(
    WrongUse,
    "is after .* tokens|another text",
    caches=["hybrid"],
    prefix=True,
    checkpoint_bytes=2**22,
)
def rows_begin_from_the_state_of_another(patch):
    """The skipped prefix and the restored state are of different lengths."""

    def change(shape, fields, count):
        for name in fields:
            if name.endswith("read_states"):
                fields[name][:count] = fields[name][:count].max()

    repack(patch, change)


# The host tier.


@defect(
    WrongUse, OTHERS, caches=["full", "windows"], prefix=True, host_bytes=2**22, spare=1, page=4
)
def a_swap_in_lands_before_its_bytes(patch):
    patch.setattr(HostTransfers, "advance", lambda transfers, inbound, wait=False: True)


@defect(
    WrongUse,
    OTHERS,
    caches=["full", "windows"],
    prefix=True,
    host_bytes=2**22,
    spare=1,
    page=4,
)
def a_page_goes_to_the_host_after_it_was_written_over(patch):
    patch.setattr(CacheOwner, "announce_donation", lambda owner: None)


# Results.


@defect(WrongProgress, caches=["full"], overlap=True, prefix=False, spare=0)
def results_of_an_old_epoch_count(patch):
    """A step that was under way when its sequence was preempted is counted all the same."""

    def make(collect):
        def trusting(collector, flight, steps):
            epochs = tuple(part.sequence.epoch for part in flight.parts)
            return collect(collector, replace(flight, epochs=epochs), steps)

        return trusting

    wrap(patch, Collector, "collect", make)


@defect(WrongOutput, caches=["full"], **GUESSED)
def a_draft_more_than_was_right_is_accepted(patch):
    def make(collect):
        def generous(collector, flight, sampled):
            if flight.shape.drafts:
                counts = [len(part.drafts) for part in flight.parts]
                accepted = sampled[0].accepted[: len(counts)] + 1
                sampled = [replace(rows, accepted=np.minimum(accepted, counts)) for rows in sampled]
            return collect(collector, flight, sampled)

        return generous

    wrap(patch, Collector, "collect", make)


@defect(ValueError, "tokens computed of the .* to publish", caches=["full"], page=4, **GUESSED)
def a_page_with_a_rejected_draft_is_published(patch):
    """The last token of a text has no keys and values yet: those of a rejected draft are in its place."""

    def make(publish):
        def early(collector, sequence):
            sequence.collected += 1
            publish(collector, sequence)
            sequence.collected -= 1

        return early

    wrap(patch, Collector, "_publish", make)


@defect(ValueError, "each row of a step needs one or more new tokens", caches=["full"], **GUESSED)
def the_books_keep_rejected_drafts(patch):
    patch.setattr(PageAllocator, "take_back", lambda allocator, number, tokens: None)


@defect(ValueError, "computed tokens, got .* to keep", caches=["full"], **FOLLOWED)
def the_tokens_of_the_step_in_flight_are_taken_back_too(patch):
    def make(take_back):
        def to_the_collected(collector, sequence, drafts, accepted):
            take_back(collector, sequence, drafts, accepted)
            collector._allocator.take_back(sequence.number, sequence.collected)
            return accepted

        return to_the_collected

    wrap(patch, Collector, "_take_back", make)


@defect(WrongUse, "keeps another text", caches=["full"], **FOLLOWED)
def rows_in_flight_are_where_the_host_thinks(patch):
    def change(shape, fields, count):
        if shape.drafter is not None:
            fields["carry"][:count] = 0

    repack(patch, change)


@defect(WrongUse, "keeps another text", caches=["full"], **FOLLOWED)
def texts_of_prompts_are_not_kept(patch):
    patch.setattr(SequenceRunner, "keeps_texts", False)


@defect(WrongUse, "another text", caches=["full"], wishes=[({"min_tokens": 20},)], **FOLLOWED)
def stop_ids_are_let_through_where_the_host_thinks(patch):
    """How many tokens mask the stop ids depends on how many drafts were accepted."""

    def may_follow(sequence):
        known = len(sequence.tokens) + sequence.pending
        return sequence.computed == known - 1 and known + 1 != sequence.longest

    patch.setattr(speculation, "_may_follow", may_follow)


@defect(WrongOutput, caches=["full"], rows=5, spare=0, page=4, budget=16)
def who_comes_back_forgets_what_it_has_generated(patch):
    """Penalties count the output of before a preemption."""
    wrap(
        patch,
        SequenceRunner,
        "admit",
        lambda admit: lambda sequence_runner, rows, _=(): admit(sequence_runner, rows),
    )


@defect(WrongOutput, caches=["full"], wishes=[(GRAMMAR,)])
def two_rows_get_the_masks_of_each_other(patch):
    def change(spec, mask_of_row):
        if (mask_of_row[:2] < spec.masks).all():
            mask_of_row[:2] = mask_of_row[1::-1]

    remask(patch, change)


@defect(
    RuntimeError,
    "a token that is not allowed",
    caches=["full"],
    wishes=[(GRAMMAR, {})],
    **GUESSED | {"drafted_share": 0.5, "rows": 3, "spare": None},
)
def drafts_are_verified_beside_a_row_whose_mask_is_not_known_yet(patch):
    patch.setattr(RequestState, "has_mask", True)


@defect(WrongOutput, caches=["full"], wishes=[(GRAMMAR, {})])
def a_free_row_gets_the_mask_of_another(patch):
    def change(spec, mask_of_row):
        mask_of_row[:] = mask_of_row.min()

    remask(patch, change)


@defect(
    RuntimeError,
    "a token that is not allowed",
    caches=["full"],
    overlap=True,
    wishes=[(GRAMMAR,)],
)
def a_token_counts_that_was_forced_while_its_step_ran(patch):
    """The step in flight samples the first of the forced tokens again."""

    def make(settled):
        return lambda unsampled: (unsampled.step.parts, settled(unsampled)[1])

    wrap(patch, UnsampledStep, "settled", make)


@defect(
    RuntimeError,
    "a token that is not allowed",
    caches=["full"],
    overlap=True,
    wishes=[(GRAMMAR,)],
)
def a_step_is_sampled_before_the_one_before_was_read(patch):
    """Its masks are those of the token before."""

    def make(send):
        def hasty(pipeline, plan):
            send(pipeline, plan)
            if pipeline._unsampled is not None:
                pipeline.sample()

        return hasty

    wrap(patch, StepPipeline, "send", make)


@defect(RuntimeError, "a token that is not allowed", caches=["full"], wishes=[(GRAMMAR,)])
def a_row_keeps_its_first_mask(patch):
    def make(take):
        def late(constraint, computed, generated):
            before = constraint.mask
            taken = take(constraint, computed, generated)
            constraint.mask = before if before.any() else constraint.mask
            return taken

        return late

    wrap(patch, TokenConstraint, "_take", make)


# Found after many programs alone; each belongs to a promise of which another defect is found at once.
LATE = (
    "stop_ids_are_let_through_where_the_host_thinks",
    "a_multi_step_program_goes_on_for_a_step_too_long",
)


@pytest.mark.parametrize("name", fast_cases(DEFECTS, *(set(DEFECTS) - set(LATE))))
def test_every_defect_is_found_by_what_it_states(name, monkeypatch):
    DEFECTS[name].assert_found(monkeypatch, lambda: play(*SETTINGS[name], seeds=40))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_without_the_defect_nothing_is_found(name):
    """The same programs get through when nothing was put in, so it is the defect that is found."""
    play(*SETTINGS[name], seeds=5)
