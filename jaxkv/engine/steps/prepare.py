"""Prepares the cache for a step: clears new entries of the sampling group, and copies shared pages."""

import logging

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.step_plan import StepPlan
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.cache_programs import copy_batches
from jaxkv.runner.rows import Row
from jaxkv.runner.sequence_runner import SequenceRunner

_LOG = logging.getLogger(__name__)

Failures = list[tuple[RequestState, Exception]]
"""Requests whose preparation failed, with the errors."""


def prepare(sequence_runner: SequenceRunner, plan: StepPlan) -> Failures:
    """Prepares the cache for a plan; returns the requests whose preparation failed, while the cache is intact.

    An entry of the sampling group keeps the values of its last owner. It is initialised in three cases: the new owner
    uses penalties or logits processors, the device drafts from texts, or the last owner had a logit bias. A program
    with penalties would add that bias to every row's logits.

    Raises:
        CachePoisoned: the cache is lost.
    """
    failures: Failures = []
    for sequence, entry in plan.new_entries:
        needed = sequence.features.needs_admission or sequence_runner.keeps_texts
        if needed or sequence_runner.is_biased(entry):
            failures += _admit(sequence_runner, sequence)
    return failures + _copy(sequence_runner, plan) if plan.copies else failures


def _admit(sequence_runner: SequenceRunner, sequence: RequestState) -> Failures:
    request = sequence.request
    row = Row(sequence.number, request.prompt, 0, request.params)
    try:
        sequence_runner.admit([row], [sequence.token_ids] if sequence.generated else ())
    except STEP_FAILURES as error:
        return [(sequence, error)]
    return []


def _copy(sequence_runner: SequenceRunner, plan: StepPlan) -> Failures:
    """Makes all copies in batches; if a batch fails, makes its copies one by one to find the failing requests."""
    failures: dict[RequestState, Exception] = {}
    rest = list(plan.copies)
    for batch in copy_batches([copy for _, copy in rest]):
        owned, rest = rest[: len(batch)], rest[len(batch) :]
        try:
            sequence_runner.copy(batch)
        except STEP_FAILURES as error:
            _LOG.warning(
                "a batch of %d page and state copies failed; each is retried alone: %r",
                len(batch),
                error,
            )
            failures |= _copy_alone(sequence_runner, owned)
    return list(failures.items())


def _copy_alone(
    sequence_runner: SequenceRunner, owned: list[tuple[RequestState, PageCopy]]
) -> dict[RequestState, Exception]:
    failures: dict[RequestState, Exception] = {}
    for sequence, copy in owned:
        if sequence in failures:
            continue
        try:
            sequence_runner.copy([copy])
        except STEP_FAILURES as error:
            failures[sequence] = error
    return failures
