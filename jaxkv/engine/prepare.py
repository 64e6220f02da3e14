"""What a plan needs done to the cache before its step: clean entries of the sampling group, copies of shared pages."""

import logging

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.step_plan import StepPlan
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.cache_programs import copy_batches
from jaxkv.runner.rows import Row
from jaxkv.runner.sequence_runner import SequenceRunner

_LOG = logging.getLogger(__name__)

Failures = list[tuple[RequestState, Exception]]


def prepare(sequence_runner: SequenceRunner, plan: StepPlan) -> Failures:
    """Prepares a plan; returns whom something failed for, while the cache lives on.

    A program with penalties reads the entry of every row, but a row without penalties only feels what an entry adds
    to its logits. So an entry is made clean if its new owner has penalties, or its former one had a bias.

    Raises:
        CachePoisoned: the cache is lost.
    """
    failures: Failures = []
    for sequence, entry in plan.fresh:
        if sequence.features.penalties or sequence_runner.is_biased(entry):
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
    """Makes the copies of all in few runs; where one fails, each owner's by themselves, to find whose it is."""
    failures: dict[RequestState, Exception] = {}
    rest = list(plan.copies)
    for batch in copy_batches([copy for _, copy in rest]):
        owned, rest = rest[: len(batch)], rest[len(batch) :]
        try:
            sequence_runner.copy(batch)
        except STEP_FAILURES as error:
            _LOG.warning(
                "copies of %d pages and states failed, each runs alone: %r", len(batch), error
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
