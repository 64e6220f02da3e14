"""The requests that wait and those that run, each in order of priority and arrival."""

from bisect import insort

from jaxkv.engine.request_state import FINISHED, ORDER, RUNNING, WAITING, RequestState


class RequestQueues:
    """Two sorted queues. A request is in at most one of them; each verb may be repeated after an interrupt.

    Attributes:
        waiting: requests that hold no pages, first come first. Samples that wait for another sample are not in it.
        running: requests that hold pages, first come first.
    """

    def __init__(self) -> None:
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []

    def wait(self, state: RequestState) -> None:
        """Queues a request, or returns a running one to the queue."""
        state.status = WAITING
        if state not in self.waiting:
            insort(self.waiting, state, key=ORDER)
        # Last: after an interrupt above, the request is found here again.
        if state in self.running:
            self.running.remove(state)

    def run(self, state: RequestState) -> None:
        """Makes a request one of those that run."""
        if state in self.waiting:
            self.waiting.remove(state)
        insort(self.running, state, key=ORDER)
        state.status = RUNNING

    def end(self, state: RequestState) -> None:
        """Removes a request that has ended."""
        if state in self.waiting:
            self.waiting.remove(state)
        state.status = FINISHED
        # Last: after an interrupt above, the request is found here again.
        if state in self.running:
            self.running.remove(state)
