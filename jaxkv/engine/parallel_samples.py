"""Samples of one prompt: the first computes it, and the others start from its pages of it. Touches no arrays.

`RequestState.first_sample` decides which sample another one waits for; an interrupt may leave it in the list
`other_samples` of one that it no longer waits for.
"""

from bisect import insort
from collections.abc import Callable

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.engine.request_state import ORDER, RUNNING, WAITING, RequestState


class ParallelSamples:
    """Starts the other samples of prompts, within the lists of one scheduler.

    Args:
        allocator: holds the pages.
        waiting, running: the scheduler's own lists, in order.
        release: gives back what a sequence holds, if it holds anything.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        waiting: list[RequestState],
        running: list[RequestState],
        release: Callable[[RequestState], None],
    ) -> None:
        self._allocator = allocator
        self._waiting = waiting
        self._running = running
        self._release = release

    def start(self, max_rows: int) -> None:
        """Starts the other samples of prompts that are computed but for their last token, as far as there are rows."""
        for first in [one for one in self._running if one.other_samples and not one.remaining]:
            first.other_samples = self._waiting_for(first)
            while first.other_samples and len(self._running) < max_rows:
                self._fork(first, first.other_samples[0])
            self.detach(first)

    def detach(self, first: RequestState) -> None:
        """Makes the next sample of a prompt, if there is one, wait for itself and the others wait for it."""
        waiting = self._waiting_for(first)
        if waiting:
            following, *others = waiting
            following.other_samples += [one for one in others if one not in following.other_samples]
            for other in others:
                other.first_sample = following
            if following not in self._waiting:
                insort(self._waiting, following, key=ORDER)
            following.first_sample = None
        first.other_samples = []

    def _fork(self, first: RequestState, other: RequestState) -> None:
        """Starts one sample from the pages of the first one, or leaves it waiting for it."""
        try:
            self._allocator.fork(first.number, other.number)
            other.computed = other.collected = first.computed
            other.reserved = other.writable = first.computed
            other.shared, other.cached = first.computed, 0
            other.keys = first.keys and first.keys.copy()
            other.admitted = first.admitted
            other.status = RUNNING
            insort(self._running, other, key=ORDER)
            first.other_samples.remove(other)
            other.first_sample = None
        except BaseException:
            self._undo(first, other)
            raise

    def _undo(self, first: RequestState, other: RequestState) -> None:
        self._release(other)
        if other in self._running:
            self._running.remove(other)
        other.restart()
        other.cached, other.shared, other.keys, other.admitted = None, 0, None, None
        other.status, other.first_sample = WAITING, first
        if other not in first.other_samples:
            first.other_samples.insert(0, other)

    def _waiting_for(self, first: RequestState) -> list[RequestState]:
        """Returns the samples that wait for this one, and do not wait for themselves or run by now."""
        return [
            one
            for one in first.other_samples
            if one.first_sample is first and one.status == WAITING and one not in self._waiting
        ]
