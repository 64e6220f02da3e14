"""What becomes of a step that was read: tokens are handed out, and full pages are offered to the prefix index.

Only then does anything count. Who has ended or failed is told to the caller, which gives their pages back.
"""

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.in_flight import InFlightStep, report
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.state_checkpoints import StateCheckpoints
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.sampled_rows import SampledRows

_LOG = logging.getLogger(__name__)

Ended = tuple[RequestState, Exception | None]
"""A sequence that is done, with its `reason`, or that failed: with an error, or with logits that are no numbers."""


class _Choices(NamedTuple):
    """What one step chose, as lists where every row is looked at."""

    rows: SampledRows
    tokens: list[int]
    finite: list[bool]


class Collector:
    """Collects the steps of one engine.

    Args:
        allocator: holds the pages.
        prefix: pages of earlier prompts, if they are kept.
        page_sizes: of all paged groups.
        clock: returns seconds.
        state_checkpoints: keeps states of recurrent layers for the index, where a model has them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        prefix: PrefixIndex | None,
        page_sizes: Collection[int],
        clock: Callable[[], float],
        state_checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self._allocator = allocator
        self._prefix = prefix
        self._state_checkpoints = state_checkpoints
        self._page_sizes = page_sizes
        self._clock = clock

    def collect(self, step: InFlightStep, choices: Sequence[SampledRows]) -> list[Ended]:
        """Takes the results of every row that still counts, and returns who has ended or failed.

        Args:
            step: a step, or several at once.
            choices: what each of its steps chose.

        Raises:
            CachePoisoned: copying for a checkpoint cost the cache.
        """
        ended: list[Ended] = []
        now, reports = self._clock(), step.shape.features.logprobs is not None
        listed = [_Choices(rows, rows.tokens.tolist(), rows.finite.tolist()) for rows in choices]
        finite = listed[0].finite
        for index, (part, epoch) in enumerate(zip(step.parts, step.epochs, strict=True)):
            sequence, start, count, emits, _ = part
            if sequence.epoch != epoch:
                if self._state_checkpoints is not None:
                    self._state_checkpoints.confirm(sequence, finite=finite[index])
                continue
            sequence.collected = start + count
            if not emits and not finite[index]:
                sequence.tainted = True
            if emits:
                sequence.pending -= emits
                try:
                    taken = _accept(sequence, index, listed[:emits], reports=reports)
                except STEP_FAILURES as error:
                    ended.append((sequence, error))
                    continue
                # Of several steps, those after its last token were computed in vain.
                sequence.collected -= emits - taken
                if sequence.started is None and taken:
                    sequence.started = now
                if taken < emits and sequence.reason is None:
                    sequence.tainted = True
                    ended.append((sequence, None))
                    continue
            if sequence.keys is not None and sequence.collected >= sequence.publishes_at:
                self._publish(sequence)
            if self._state_checkpoints is not None:
                kept = [length for row, length, _ in step.snapshots if row == index]
                self._state_checkpoints.settle(sequence, kept)
                if sequence.reason is not None:
                    self._state_checkpoints.settle_end(sequence)
            if sequence.reason is not None:
                ended.append((sequence, None))
            elif self._allocator.has_windows:
                # Last: the index and checkpoints were offered these pages first.
                self._allocator.free_out_of_window(sequence.number, sequence.collected)
        return ended

    def _publish(self, sequence: RequestState) -> None:
        """Offers the pages that are full and known to be good to those that begin alike.

        They are good because this sequence's own steps have read all of them and chose finite tokens, so pages that a
        neighbour withdrew when its logits went wrong may come back. The index is also told of what a sequence computes
        first, to count whether it began with a hit.
        """
        if self._prefix is None or sequence.keys is None or sequence.tainted:
            return
        done = sequence.collected
        self._prefix.publish(sequence.number, sequence.tokens, sequence.keys, done)
        ends = ((done // size + 1) * size for size in self._page_sizes)
        sequence.publishes_at = min(ends, default=sys.maxsize)


def _accept(
    sequence: RequestState, index: int, listed: Sequence[_Choices], *, reports: bool
) -> int:
    """Takes a row's tokens up to the last of its sequence, or to logits that are no numbers; returns how many."""
    for taken, (rows, tokens, finite) in enumerate(listed):
        if (taken and sequence.reason is not None) or not finite[index]:
            return taken
        token = tokens[index]
        sequence.accept(token, report(sequence, token, index, rows) if reports else None)
    return len(listed)
