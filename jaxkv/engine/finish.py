"""How sequences end: done, aborted, failed alone, or put off once more. Gives their pages back; reads no device."""

import logging
from collections.abc import Callable, Iterable

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.request_state import RUNNING, RequestState
from jaxkv.engine.scheduler import Scheduler
from jaxkv.errors import STEP_FAILURES
from jaxkv.memory import is_out_of_memory

_LOG = logging.getLogger(__name__)


class Finisher:
    """Ends the sequences of one engine.

    Args:
        scheduler: has them.
        prefix: must not keep pages of whoever's logits went wrong.
        clock: returns seconds.
    """

    def __init__(
        self, scheduler: Scheduler, prefix: PrefixIndex | None, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._prefix = prefix
        self._clock = clock

    def finish(self, sequence: RequestState, reason: str) -> None:
        """Ends a sequence for a reason that none of its tokens gave."""
        if sequence.tainted and self._prefix is not None and sequence.status == RUNNING:
            self._prefix.withdraw(sequence.number)
        try:
            sequence.end(reason)
        except STEP_FAILURES as error:
            _LOG.error("the last text of a request is lost: %r", error)
            sequence.stream = None
            sequence.end(reason)
        self.drop(sequence)

    def drop(self, sequence: RequestState) -> None:
        """Gives back what a sequence has that was told why it ends."""
        self._scheduler.drop(sequence)
        sequence.ended = self._clock()

    def fail(self, sequence: RequestState, error: Exception) -> None:
        """Ends a sequence whose own part in a step failed."""
        _LOG.error("a request failed alone: %r", error)
        sequence.error = error
        self.finish(sequence, "error")

    def settle(self, ended: Iterable[tuple[RequestState, Exception | None]]) -> None:
        """Ends those of a step that was read, for whatever reason each has: an error, its tokens, or no numbers."""
        for sequence, error in ended:
            if error is not None:
                self.fail(sequence, error)
            elif sequence.reason is None:
                _LOG.error("a request failed: its logits were not finite")
                self.finish(sequence, "error")
            else:
                self.drop(sequence)

    def put_off(self, sequence: RequestState, error: Exception) -> None:
        """What a sequence needed before its step failed: it waits once more if memory was short, and else fails."""
        if is_out_of_memory(error) and not sequence.retried:
            _LOG.warning("a request is put off, for want of memory: %r", error)
            sequence.retried = True
            self._scheduler.put_off(sequence)
        else:
            self.fail(sequence, error)

    def blame(self, sequences: list[RequestState], error: Exception) -> None:
        """A step failed before it began: its one row is at fault, or each row must show in a step of its own."""
        running = [sequence for sequence in sequences if sequence.status == RUNNING]
        if len(running) == 1:
            self.fail(running[0], error)
        else:
            _LOG.warning("a step of %d rows failed, each runs alone: %r", len(running), error)
            self._scheduler.isolate(running)
