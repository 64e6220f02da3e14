"""Messages and their framing."""

import math
import socket
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxkv import ReasoningTokens, SamplingParams, StructuredOutputs
from jaxkv.config.plain_sampling import pack_sampling, unpack_sampling
from jaxkv.serve.wire import (
    Abort,
    FrameWriter,
    StepDone,
    Submit,
    Tokens,
    WireDamaged,
    frame,
    frames_from_engine,
    frames_to_engine,
)

MESSAGES = [
    Submit(call=1, ids=[1, 2, 3], sampling={"n": 2}, salt=b"\x00"),
    Abort(1, 0),
    Abort(2**40),
]


@given(st.lists(st.integers(1, 9)))
def test_messages_do_not_depend_on_how_the_bytes_are_cut(cuts):
    data = b"".join(map(frame, MESSAGES))
    frames, found = frames_to_engine(), []
    for cut in [*cuts, len(data)]:
        found += frames.feed(data[:cut])
        data = data[cut:]
    assert found == MESSAGES


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", frame(StepDone([]))]
)
def test_bytes_that_are_no_message_for_this_end_are_refused(data):
    with pytest.raises(WireDamaged):
        frames_to_engine().feed(data)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, stop=["a"], logit_bias={7: -math.inf, 8: 1.5}),
        SamplingParams(max_tokens=None, seed=2**64 - 1, stop_token_ids=(1, 2), logprobs=5),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"})),
        SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])),
        SamplingParams(
            structured_outputs=StructuredOutputs(
                regex="a", reasoning=ReasoningTokens(ends=[1], begins=[2], header=[3, 4])
            )
        ),
        SamplingParams(logits_processors={"a": {"x": [[1], [2]], "y": 0.5, "z": True}, "b": {}}),
    ],
)
def test_sampling_parameters_survive_the_wire(params):
    [message] = frames_to_engine().feed(
        frame(Submit(call=0, ids=[1], sampling=pack_sampling(params)))
    )
    assert unpack_sampling(message.sampling) == params


def test_a_writer_keeps_what_does_not_fit_and_loses_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer, frames, found = FrameWriter(ours), frames_from_engine(), []
        sent = [StepDone([Tokens(0, 0, list(range(10_000)))]) for _ in range(30)]
        for message in sent:
            writer.write(message)
        assert writer.num_kept
        theirs.setblocking(False)
        while len(found) < len(sent):
            writer.flush()
            found += frames.feed(theirs.recv(2**16))
        assert found == sent
        assert not writer.num_kept


def write_forever(writer):
    while True:
        writer.write(StepDone([Tokens(0, 0, list(range(1000)))]))


def test_a_process_that_never_reads_is_given_up():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter(ours, most=10_000)
        with pytest.raises(WireDamaged, match="does not read"):
            write_forever(writer)


def test_the_last_words_wait_for_a_reader_but_not_for_ever():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer, frames, found = FrameWriter(ours), frames_from_engine(), []
        sent = StepDone([Tokens(0, 0, list(range(1_000_000)))])
        writer.write(sent)
        writer.flush(seconds=0.01)
        assert writer.num_kept

        def read():
            while not found:
                found.extend(frames.feed(theirs.recv(2**16)))

        reader = threading.Thread(target=read)
        reader.start()
        writer.flush(seconds=60.0)
        reader.join()
        assert found == [sent]
        assert not writer.num_kept
