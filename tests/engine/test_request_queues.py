"""The queues of requests: order, and methods that may be called again after an interrupt."""

import pytest

from jaxkv.engine.request_queues import RequestQueues
from jaxkv.engine.request_state import FINISHED, RUNNING, WAITING
from tests.engine.test_scheduler import Serving


@pytest.fixture
def states():
    serving = Serving()
    for number in range(3):
        serving.add([number, 1], 2)
    return serving.sequences


def test_requests_come_in_order_of_arrival_however_they_are_queued(states):
    queues = RequestQueues()
    for state in reversed(states):
        queues.wait(state)
    assert queues.waiting == states
    for state in reversed(states):
        queues.run(state)
    assert (queues.waiting, queues.running) == ([], states)


@pytest.mark.parametrize(
    ("method", "status", "sizes"),
    [("wait", WAITING, (1, 0)), ("run", RUNNING, (0, 1)), ("end", FINISHED, (0, 0))],
)
@pytest.mark.parametrize("before", ["wait", "run"])
def test_a_method_called_twice_does_what_it_does_once(states, before, method, status, sizes):
    queues = RequestQueues()
    getattr(queues, before)(states[0])
    for _ in range(2):
        getattr(queues, method)(states[0])
        assert (len(queues.waiting), len(queues.running)) == sizes
        assert states[0].status == status
