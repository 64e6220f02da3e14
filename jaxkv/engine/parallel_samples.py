"""Parallel samples of one prompt: the first sample computes the prompt, and the others start from its pages.

`RequestState.first_sample` is the sample that another one waits for, and `other_samples` are those that wait for a
sample. An interrupt may leave a sample in `other_samples` that waits no more, so readers compare both.
"""

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.engine.request_queues import RequestQueues
from jaxkv.engine.request_state import WAITING, RequestState


class ParallelSamples:
    """Starts the other samples of each prompt.

    Args:
        allocator: allocates and shares the pages.
        queues: the requests of one scheduler.
    """

    def __init__(self, allocator: PageAllocator, queues: RequestQueues) -> None:
        self._allocator = allocator
        self._queues = queues

    def start(self, max_rows: int) -> None:
        """Starts the other samples of prompts that are computed up to their last token.

        Args:
            max_rows: most running requests. If more samples remain, one is queued and the others wait for it.
        """
        running = self._queues.running
        for first in [one for one in running if one.other_samples and not one.remaining]:
            first.other_samples = self._waiting_for(first)
            while first.other_samples and len(running) < max_rows:
                self._fork(first, first.other_samples[0])
            self.detach(first)

    def detach(self, first: RequestState) -> None:
        """Queues the next sample as the first one of the samples that still wait for `first`, if there are any."""
        waiting = self._waiting_for(first)
        if waiting:
            following, *others = waiting
            following.other_samples += [one for one in others if one not in following.other_samples]
            for other in others:
                other.first_sample = following
            self._queues.wait(following)
            following.first_sample = None
        first.other_samples = []

    def _fork(self, first: RequestState, other: RequestState) -> None:
        """Starts one sample from the pages of the first one; if that fails, it waits as before."""
        try:
            self._allocator.fork(first.number, other.number)
            other.start_from(first, self._allocator.held(other.number))
            self._queues.run(other)
            first.other_samples.remove(other)
            other.first_sample = None
        except BaseException:
            self._undo(first, other)
            raise

    def _undo(self, first: RequestState, other: RequestState) -> None:
        self._allocator.release_if_open(other.number)
        if other in self._queues.running:
            self._queues.running.remove(other)
        other.restart()
        other.forget_admission()
        other.status, other.first_sample = WAITING, first
        if other not in first.other_samples:
            first.other_samples.insert(0, other)

    def _waiting_for(self, first: RequestState) -> list[RequestState]:
        """Returns the samples that wait for this one and are neither queued themselves nor running."""
        return [
            one
            for one in first.other_samples
            if one.first_sample is first
            and one.status == WAITING
            and one not in self._queues.waiting
        ]
