"""Several samples of one prompt: the first computes the prompt, and the others start from its pages.

`RequestState.first_sample` decides which sample another one waits for. An interrupt may leave a sample in the list
`other_samples` of one that it no longer waits for.
"""

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.engine.request_queues import RequestQueues
from jaxkv.engine.request_state import WAITING, RequestState


class ParallelSamples:
    """Starts the other samples of prompts.

    Args:
        allocator: holds the pages.
        queues: the requests of one scheduler.
    """

    def __init__(self, allocator: PageAllocator, queues: RequestQueues) -> None:
        self._allocator = allocator
        self._queues = queues

    def start(self, max_rows: int) -> None:
        """Starts the other samples of prompts that are computed but for their last token, up to `max_rows` in all."""
        running = self._queues.running
        for first in [one for one in running if one.other_samples and not one.remaining]:
            first.other_samples = self._waiting_for(first)
            while first.other_samples and len(running) < max_rows:
                self._fork(first, first.other_samples[0])
            self.detach(first)

    def detach(self, first: RequestState) -> None:
        """Makes the next sample of a prompt, if there is one, compute it, and the others wait for that one."""
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
        """Starts one sample from the pages of the first one, or leaves it waiting for it."""
        try:
            self._allocator.fork(first.number, other.number)
            other.begin_from(first, self._allocator.held(other.number))
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
        """Returns the samples that wait for this one, and do not wait for themselves or run by now."""
        return [
            one
            for one in first.other_samples
            if one.first_sample is first
            and one.status == WAITING
            and one not in self._queues.waiting
        ]
