"""Ends requests that are done, aborted or failed, and handles failed steps: requeue, fail or isolate."""

import logging
from collections.abc import Callable, Iterable

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.request_state import RUNNING, RequestState
from jaxkv.engine.scheduler import Scheduler
from jaxkv.errors import STEP_FAILURES
from jaxkv.memory import is_out_of_memory

_LOG = logging.getLogger(__name__)


class Finisher:
    """Ends the requests of one engine.

    Args:
        scheduler: holds the requests.
        prefix: the prefix index, from which pages of tainted requests are withdrawn; `None` if there is none.
        clock: returns seconds.
    """

    def __init__(
        self, scheduler: Scheduler, prefix: PrefixIndex | None, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._prefix = prefix
        self._clock = clock

    def finish(self, sequence: RequestState, reason: str) -> None:
        """Ends a request for a reason other than its last token, such as "abort" or "error"."""
        if sequence.tainted and self._prefix is not None and sequence.status == RUNNING:
            self._prefix.withdraw(sequence.number)
        try:
            sequence.end(reason)
        except STEP_FAILURES as error:
            _LOG.error(
                "the remaining text of a request could not be decoded and is lost: %r", error
            )
            sequence.stream = None
            sequence.end(reason)
        self.release(sequence)

    def release(self, sequence: RequestState) -> None:
        """Releases the pages of a request whose `reason` is set, and records its end time."""
        self._scheduler.end(sequence)
        sequence.ended = self._clock()

    def fail(self, sequence: RequestState, error: Exception) -> None:
        """Ends a request with an error of its own; other requests continue."""
        _LOG.error("a request failed: %r", error)
        sequence.error = error
        self.finish(sequence, "error")

    def end_all(self, ended: Iterable[tuple[RequestState, Exception | None]]) -> None:
        """Ends the requests that `Collector.collect` returned, each with its error or its reason."""
        for sequence, error in ended:
            if error is not None:
                self.fail(sequence, error)
            elif sequence.reason is None:
                _LOG.error("a request failed: its logits were not finite")
                self.finish(sequence, "error")
            else:
                self.release(sequence)

    def requeue_once(self, sequence: RequestState, error: Exception) -> None:
        """Handles a failed preparation of one request: requeues it once on out-of-memory, otherwise fails it."""
        if is_out_of_memory(error) and not sequence.retried:
            _LOG.warning("a request is requeued after an out-of-memory error: %r", error)
            sequence.retried = True
            self._scheduler.requeue(sequence)
        else:
            self.fail(sequence, error)

    def fail_if_retried(self, sequences: Iterable[RequestState], error: Exception) -> None:
        """Fails those running requests of a failed step that were retried before; the caller retries the others."""
        for sequence in sequences:
            if sequence.status == RUNNING and sequence.retried:
                self.fail(sequence, error)
            sequence.retried = True

    def fail_or_isolate(self, sequences: list[RequestState], error: Exception) -> None:
        """Handles a step that could not be dispatched: fails its only request, or runs each request alone next."""
        running = [sequence for sequence in sequences if sequence.status == RUNNING]
        if len(running) == 1:
            self.fail(running[0], error)
        else:
            _LOG.warning(
                "a step of %d rows failed; each request runs alone next: %r", len(running), error
            )
            self._scheduler.isolate(running)
