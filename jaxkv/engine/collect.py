"""Applies the results of a step: appends tokens, shares full pages and states, frees pages out of sliding windows.

Full pages are published to the prefix index, and states of recurrent layers are kept as checkpoints. The results of a
step take effect only here. The caller ends the requests that `collect` returns.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.routed_experts import RoutedExperts
from jaxkv.engine.speculation.speculation import Speculation
from jaxkv.engine.state_checkpoints import StateCheckpoints
from jaxkv.engine.steps.in_flight import InFlightStep
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.sampled_rows import SampledRows, report_logprobs

Ended = tuple[RequestState, Exception | None]
"""A request, and the error of its own that ended it. Without error and `reason`, its logits were not finite."""


class _StepTokens(NamedTuple):
    """The sampled rows of one step, with the columns that every row reads as lists."""

    rows: SampledRows
    tokens: list[int]
    finite: list[bool]
    logprobs: list[float]

    def requested_logprobs(self, sequence: RequestState, index: int) -> dict[int, float] | None:
        """Returns the log-probabilities that a request asked for, from row `index`; `None` if it did not."""
        top = sequence.request.params.logprobs
        if top is None:
            return None
        token, logprob = self.tokens[index], self.logprobs[index]
        if not top:
            return {token: logprob}
        rows = self.rows
        return report_logprobs(
            token, logprob, rows.top_ids[index, :top], rows.top_logprobs[index, :top]
        )


def _step_tokens(rows: SampledRows) -> _StepTokens:
    columns = (rows.tokens, rows.finite, rows.logprob)
    return _StepTokens(rows, *[column.tolist() for column in columns])


class Collector:
    """Collects the steps of one engine.

    Args:
        allocator: allocates the pages.
        prefix: the prefix index; `None` if the prefix cache is off.
        page_sizes: page sizes of all paged groups.
        clock: returns seconds.
        state_checkpoints: keeps state checkpoints of recurrent layers; `None` if the engine keeps none.
        experts: reads the experts that were chosen for a request's tokens; `None` if the cache keeps none.
        speculation: counts accepted drafts; `None` if there are no drafts.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        prefix: PrefixIndex | None,
        page_sizes: Collection[int],
        clock: Callable[[], float],
        state_checkpoints: StateCheckpoints | None = None,
        experts: RoutedExperts | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._allocator = allocator
        self._prefix = prefix
        self._state_checkpoints = state_checkpoints
        self._experts = experts
        self._speculation = speculation
        self._page_sizes = page_sizes
        self._clock = clock

    def collect(self, step: InFlightStep, sampled: Sequence[SampledRows]) -> list[Ended]:
        """Applies the results of a step; returns the requests that ended or failed.

        Its loop runs for each row of each step, so what most rows need is decided here without a call.

        A row is dropped if its request was preempted or ended since the dispatch, which has changed the request's
        epoch.

        Args:
            step: the program that was read, of one or several steps.
            sampled: the sampled rows of each of its steps, or of each position of drafts.

        Raises:
            CachePoisoned: a copy for a state checkpoint failed and lost the cache.
        """
        ended: list[Ended] = []
        now, reports = self._clock(), step.features.logprobs is not None
        steps = [_step_tokens(rows) for rows in sampled]
        first = steps[0]
        tokens, finite, accepted = first.tokens, first.finite, first.rows.accepted
        has_windows, single = self._allocator.has_windows, len(steps) == 1
        checkpoints, version = self._state_checkpoints, step.weight_version
        for index, (part, epoch) in enumerate(zip(step.parts, step.epochs, strict=True)):
            sequence, _, count, emits, _, drafts = part
            if sequence.epoch != epoch:
                if checkpoints is not None:
                    checkpoints.confirm(sequence, finite=finite[index])
                continue
            has_end = True
            # Not `start + count`: drafts of the steps before may have been taken back since this one was planned.
            sequence.collected += count
            if not emits and not finite[index]:
                sequence.tainted = True
            if emits:
                sequence.pending -= emits
                if drafts:
                    emits = 1 + self._take_back(sequence, drafts, int(accepted[index]))
                changes = sequence.version_changes
                if not changes or changes[-1][1] != version:
                    changes.append((sequence.generated, version))
                try:
                    if not single:
                        taken = _accept(sequence, index, steps, emits, reports=reports)
                    elif taken := finite[index]:
                        logprobs = first.requested_logprobs(sequence, index) if reports else None
                        sequence.accept(tokens[index], logprobs)
                except STEP_FAILURES as error:
                    ended.append((sequence, error))
                    continue
                if sequence.started is None and taken:
                    sequence.started = now
                if taken < emits:
                    # What was computed behind its last token is not part of the text. That token was a draft, or the
                    # next step of the launch has computed it.
                    has_end = steps[taken].finite[index]
                    sequence.collected -= emits - taken - has_end
                    if sequence.reason is None:
                        sequence.tainted = True
                        ended.append((sequence, None))
                        continue
            if sequence.keys is not None and sequence.collected >= sequence.publishes_at:
                self._publish(sequence)
            if checkpoints is not None:
                kept = [length for row, length, _ in step.pending_checkpoints if row == index]
                checkpoints.keep_collected(sequence, kept)
                if sequence.reason is not None and has_end:
                    checkpoints.keep_end_of_request(sequence)
            if sequence.reason is not None:
                ended.append((sequence, self._read_experts(sequence)))
            elif has_windows:
                # Last, because the prefix index and the checkpoints above take references to these pages.
                self._allocator.free_out_of_window(sequence.number, sequence.collected)
        if self._speculation is not None:
            self._speculation.read(step.parts)
        return ended

    def _take_back(self, sequence: RequestState, drafts: Sequence[int], accepted: int) -> int:
        """Takes back the tokens of a row whose drafts were not accepted; returns the number of accepted drafts."""
        rejected = len(drafts) - accepted
        sequence.collected -= rejected
        sequence.unread_drafts -= len(drafts)
        # The step in flight, if there is one, counts from the tokens that are left.
        self._allocator.take_back(sequence.number, sequence.computed - rejected)
        if self._speculation is not None:
            self._speculation.note(len(drafts), accepted)
        return accepted

    def _read_experts(self, sequence: RequestState) -> Exception | None:
        """Reads the experts of a request that has ended, if the cache keeps them; returns the error if that fails."""
        if self._experts is not None:
            try:
                self._experts.read(sequence)
            except STEP_FAILURES as error:
                return error
        return None

    def _publish(self, sequence: RequestState) -> None:
        """Publishes the full pages of a request to the prefix index.

        All of them are good: steps of this request have read them, and their logits were finite. So it is right to
        publish a page again that another request withdrew after logits that were not finite. The first call of a
        request may come before a page is full; the index then only counts a hit or a miss.
        """
        if self._prefix is None or sequence.keys is None or sequence.tainted:
            return
        done = sequence.collected
        self._prefix.publish(sequence.number, sequence.tokens, sequence.keys, done)
        ends = ((done // size + 1) * size for size in self._page_sizes)
        sequence.publishes_at = min(ends, default=sys.maxsize)


def _accept(
    sequence: RequestState, index: int, steps: Sequence[_StepTokens], most: int, *, reports: bool
) -> int:
    """Appends a row's tokens of the first `most` steps; returns how many.

    It stops at the end of the request, and before logits that are not finite.
    """
    for taken in range(most):
        step = steps[taken]
        if (taken and sequence.reason is not None) or not step.finite[index]:
            return taken
        logprobs = step.requested_logprobs(sequence, index) if reports else None
        sequence.accept(step.tokens[index], logprobs)
    return most
