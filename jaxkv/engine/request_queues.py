"""The queues of waiting and of running requests, sorted by priority and arrival."""

from bisect import insort

from jaxkv.engine.request_state import FINISHED, ORDER, RUNNING, WAITING, RequestState


class RequestQueues:
    """Two sorted queues. A request is in at most one of them. Each method may be called again after an interrupt.

    Attributes:
        waiting: requests without pages, in order. Samples that wait for another sample are not in it.
        running: requests with pages, in order.
    """

    def __init__(self) -> None:
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []

    def wait(self, state: RequestState) -> None:
        """Moves a new or running request to the waiting queue."""
        state.status = WAITING
        if state not in self.waiting:
            insort(self.waiting, state, key=ORDER)
        # Last: after an interrupt above, the request is found here again.
        if state in self.running:
            self.running.remove(state)

    def run(self, state: RequestState) -> None:
        """Moves a request to the running queue."""
        if state in self.waiting:
            self.waiting.remove(state)
        if state not in self.running:
            insort(self.running, state, key=ORDER)
        state.status = RUNNING

    def end(self, state: RequestState) -> None:
        """Removes a request from its queue and marks it finished."""
        if state in self.waiting:
            self.waiting.remove(state)
        state.status = FINISHED
        # Last: after an interrupt above, the request is found here again.
        if state in self.running:
            self.running.remove(state)
