"""Events come out whole and in order, wherever the network cuts the stream."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxkv.bench.client.event_stream import EventStream

STREAM = (
    b": keep-alive\n\n"
    b'data: {"a": 1}\n\n'
    b'data:{"b": 2}\r\n\r\n'
    b"event: error\nid: 7\ndata: first\ndata: second\n\n"
    b"retry: 10\n\n"
    b"data: [DONE]\n\n"
    b"data: not complete"
)
PAYLOADS = [b'{"a": 1}', b'{"b": 2}', b"first\nsecond", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cuts_give_the_same_events(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    events = EventStream()
    found = []
    for begin, end in itertools.pairwise(edges):
        found += events.feed(STREAM[begin:end])
    assert found == PAYLOADS


def test_an_event_comes_out_with_the_byte_that_completes_it():
    events = EventStream()
    assert events.feed(b"data: x\n") == []
    assert events.feed(b"\n") == [b"x"]
