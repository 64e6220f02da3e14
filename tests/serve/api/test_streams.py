"""Answers of `/v1/responses` and `/v1/messages`: valid by the published schemas, and equal to their own streams."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.api.messages_stream import MessagesStream
from jaxkv.serve.api.responses_request import echoed
from jaxkv.serve.api.responses_stream import ResponsesStream
from jaxkv.serve.http.work import Usage
from jaxkv.serve.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallBegin
from tests.serve.api.schemas import event_faults, faults, message_faults

COUNTED = Usage(prompt=5, cached=2, output=7)
ANSWER = [
    Reasoning("hm"),
    Reasoning("m"),
    Content("Hel"),
    Content("lo"),
    ToolCallBegin(0, "f"),
    ToolCallArguments(0, '{"a": "x'),
    ToolCallArguments(0, '1"}'),
    ToolCallBegin(1, "g"),
    Content("!"),
]


@st.composite
def answers(draw):
    """Events in any order; each call has arguments in a few pieces."""
    found, calls = [], 0
    for kind in draw(st.lists(st.sampled_from("rct"), max_size=6)):
        text = draw(st.text("ab é{\n", min_size=1, max_size=4))
        if kind == "t":
            found.append(ToolCallBegin(calls, "f"))
            found += [ToolCallArguments(calls, piece) for piece in ('{"a"', ": 1", "}")]
            calls += 1
        else:
            found.append({"r": Reasoning, "c": Content}[kind](text))
    return found


def responded(events, reason="stop"):
    stream = ResponsesStream("1", echoed({}, "model", SamplingParams()))
    made = stream.begin()
    for event in events:
        made += stream.push([event])
    return made + stream.finish(reason, COUNTED), stream.response


def messaged(events, reason="stop", stop_string=None):
    stream = MessagesStream("1", "model", 5)
    made = stream.begin()
    for event in events:
        made += stream.push([event])
    return made + stream.finish(reason, stop_string, COUNTED), stream.message


@settings(deadline=None)
@given(answers(), st.sampled_from(["stop", "length"]))
def test_a_response_and_its_events_fit_the_schema(events, reason):
    made, response = responded(events, reason)
    assert event_faults(made) == []
    assert faults("openresponses", response, "ResponseResource") == []
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    assert made[-1]["response"] == response


@settings(deadline=None)
@given(answers(), st.sampled_from(["stop", "length"]))
def test_a_message_and_its_events_fit_the_schema(events, reason):
    made, message = messaged(events, reason)
    assert message_faults(made) == []
    assert faults("anthropic", message, "Message") == []


def test_a_response_has_an_item_for_each_part_of_the_answer():
    made, response = responded(ANSWER)
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert response["output"][0]["content"][0]["text"] == "hmm"
    assert response["output"][1]["content"][0]["text"] == "Hello"
    assert response["output"][2]["arguments"] == '{"a": "x1"}'
    assert len({item["id"] for item in response["output"]}) == 5
    assert len({item["call_id"] for item in response["output"][2:4]}) == 2
    assert response["usage"]["total_tokens"] == 12
    done = [event["item"] for event in made if event["type"] == "response.output_item.done"]
    assert done == response["output"]


def test_deltas_joined_are_the_items():
    made, response = responded(ANSWER)
    joined = {}
    for event in made:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            joined[at] = joined.get(at, "") + event["delta"]
    texts = [
        item.get("arguments") or item.get("content", [{}])[0].get("text", "")
        for item in response["output"]
    ]
    assert [joined.get(at, "") for at in range(5)] == [
        "" if text == "{}" else text for text in texts
    ]


def test_a_response_that_is_cut_says_where():
    _, response = responded(ANSWER[:4], "length")
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_that_fails_keeps_what_it_has():
    stream = ResponsesStream("1", echoed({}, "model", SamplingParams()))
    made = stream.begin() + stream.push(ANSWER[:3]) + stream.fail("server_error", "no")
    assert event_faults(made) == []
    assert stream.response["status"] == "failed"
    assert stream.response["output"][-1]["content"][0]["text"] == "Hel"


def test_logprobs_are_part_of_the_text():
    stream = ResponsesStream("1", echoed({}, "model", SamplingParams()))
    table = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]
    made = stream.begin() + stream.push([Content("a")], table) + stream.finish("stop", COUNTED)
    assert event_faults(made) == []
    assert stream.response["output"][0]["content"][0]["logprobs"] == table


def test_a_message_has_a_block_for_each_part_of_the_answer():
    _, message = messaged(ANSWER)
    assert [block["type"] for block in message["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
    assert message["content"][0]["thinking"] == "hmm"
    assert message["content"][2]["input"] == {"a": "x1"}
    assert message["content"][3]["input"] == {}
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 5


@pytest.mark.parametrize(
    ("events", "reason", "stop_string", "wanted"),
    [
        ([Content("a")], "stop", None, "end_turn"),
        ([Content("a")], "length", None, "max_tokens"),
        ([Content("a")], "stop", "END", "stop_sequence"),
        (ANSWER, "tool_calls", None, "tool_use"),
        (ANSWER, "length", None, "max_tokens"),
    ],
)
def test_a_message_says_why_it_ended(events, reason, stop_string, wanted):
    made, message = messaged(events, reason, stop_string)
    assert (message["stop_reason"], message["stop_sequence"]) == (wanted, stop_string)
    assert made[-2]["delta"]["stop_reason"] == wanted


def test_arguments_that_were_cut_are_kept_as_text():
    _, message = messaged(ANSWER[:6], "length")
    assert message["content"][-1]["input"] == {"partial_json": '{"a": "x'}


@pytest.mark.parametrize(
    "written", ['{"a": ' + "[" * 20_000, '{"a": "\\ud83d"}', '{"a": NaN}'], ids=len
)
def test_arguments_that_no_reply_can_hold_are_kept_as_text(written):
    _, message = messaged([ToolCallBegin(0, "f"), ToolCallArguments(0, written)], "length")
    assert message["content"][-1]["input"] == {"partial_json": written}
    assert msgspec.json.encode(message)
