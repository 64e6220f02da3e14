"""Parsers on any text: the events do not depend on the pieces, nothing is lost, and the work is linear."""

# ruff: noqa: RUF001 - DeepSeek's markers have wide bars.

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.serve.parsers.events import Content, ToolCallArguments, ToolCallBegin
from jaxkv.serve.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from jaxkv.serve.parsers.source import MAX_HELD, Source
from tests.serve.parsers.examples import EXAMPLES, arguments, opened, parsed

# Fragments of all formats, so that drawn texts are nearly answers.
FRAGMENTS = sorted(
    {
        marker
        for entry in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values())
        for marker in entry.format.markers
    }
    | {
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "get_weather",
        "get_time",
        "city",
    }
    | {
        "to=functions.",
        "to=",
        "analysis",
        "final",
        "assistant",
        "json",
        "```json\n",
        "days",
        "null",
    }
    | {'{"name": "', '"', '", "arguments": ', '{"city": "', '"}', "}", "{", "[", "]", "(", ")", "="}
    | {
        ">",
        "</",
        "<",
        "｜",
        "\\",
        "\\u",
        "'",
        ",",
        ";",
        ":",
        "\n",
        " ",
        "x",
        "é",
        "1.5",
        "True",
        "\x00",
    }
)
PARSERS = [(name, None) for name in TOOL_FORMATS] + [
    (None, "granite"),
    ("hermes", "qwen3"),
    ("mistral", "mistral"),
    ("qwen3_coder", "hunyuan_a13b"),
    ("openai", "openai_gptoss"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)
examples = st.sampled_from(EXAMPLES)


@st.composite
def broken_examples(draw):
    """Draws an example's text with some parts left out, doubled or replaced."""
    text = draw(examples).text
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(start + 20, len(text))))
        text = (
            text[:start] + draw(st.sampled_from([*FRAGMENTS, "", text[start:end] * 2])) + text[end:]
        )
    return text


def cut(draw, text):
    """Draws pieces that make up a text."""
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("tools", "reasoning"), PARSERS)
@settings(max_examples=9, deadline=None, derandomize=True)
@given(data=st.data(), text=texts | broken_examples())
def test_the_events_do_not_depend_on_the_pieces(tools, reasoning, data, text):
    options = {
        "prompt_end": data.draw(st.sampled_from(["", "<think>\n", "<|start|>assistant"])),
        "special": data.draw(st.sampled_from([(), ("</s>", "<|im_end|>", "<think>", "<|end|>")])),
        "tool_choice": data.draw(st.sampled_from(["auto", "auto", "required", "get_time"])),
    }
    pieces = cut(data.draw, text)
    whole = parsed(opened(tools, reasoning, **options), text)
    assert parsed(opened(tools, reasoning, **options), *pieces) == whole
    assert parsed(opened(tools, reasoning, **options), *text) == whole
    _check(whole)


def _check(events):
    """Events have text, and calls have a name, an index and their arguments behind them."""
    calls = 0
    for event, before in zip(events, [None, *events], strict=False):
        if isinstance(event, ToolCallBegin):
            assert event.index == calls
            calls += 1
            assert event.name
        else:
            assert event.text
            event.text.encode()
        if isinstance(event, ToolCallArguments):
            assert isinstance(before, ToolCallBegin)
            assert before.index == event.index


@pytest.mark.parametrize("tools", [name for name in TOOL_FORMATS if name != "openai"])
@settings(max_examples=9, deadline=None, derandomize=True)
@given(text=texts | broken_examples())
def test_a_text_without_calls_is_content_as_it_is(tools, text):
    events = parsed(opened(tools), text)
    if not any(isinstance(event, ToolCallBegin) for event in events):
        assert "".join(event.text for event in events) == text


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    text=texts | broken_examples(),
    tools=st.sampled_from([name for name in TOOL_FORMATS if name != "openai"]),
    options=st.sampled_from(
        [{"request_tools": None}, {"request_tools": []}, {"tool_choice": "none"}]
    ),
)
def test_without_tools_a_marker_is_content(text, tools, options):
    assert parsed(opened(tools, **options), text) == ([Content(text)] if text else [])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(FRAGMENTS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=4) | st.sampled_from(FRAGMENTS), json_values, max_size=4)
CARRIERS = {
    "hermes": '<tool_call>{{"name": "get_time", "arguments": {}}}</tool_call>',
    "granite": '<|tool_call|>[{{"arguments": {}, "name": "get_time"}}]',
    "llama3_json": '{{"name": "get_time", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]get_time[ARGS]{}",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "openai": "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
}


@pytest.mark.parametrize("tools", CARRIERS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), value=objects, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_any_json_object_arrives_as_arguments(tools, data, value, ascii_only, indent):
    written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    text = CARRIERS[tools].format(written)
    events = parsed(opened(tools), *cut(data.draw, text))
    assert events == [ToolCallBegin(0, "get_time"), ToolCallArguments(0, written)]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    data=st.data(),
    value=st.text(max_size=12),
    days=st.integers(),
    where=st.dictionaries(st.text(max_size=3), json_values, max_size=3),
)
def test_any_string_arrives_through_tags(data, value, days, where):
    written = json.dumps(where)
    if "</parameter>" in value + written:
        return
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{value}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n"
        f"<parameter=where>\n{written}\n</parameter>\n</function>\n</tool_call>"
    )
    events = parsed(opened("qwen3_coder"), *cut(data.draw, text))
    assert arguments(events) == [{"city": value, "days": days, "where": where}]


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), value=literals)
def test_any_python_literal_arrives_as_json(data, value):
    text = f"[get_time(a={value!r}, b=[{value!r},])]"
    events = parsed(opened("llama4_pythonic"), *cut(data.draw, text))
    assert arguments(events) == [{"a": value, "b": [value]}]


# Texts of a period that could make a parser look back: calls that fail late, markers in markers, and long runs.
PERIODS = {
    "prose": "word <b> ",
    "spaces": " ",
    "angles": "<",
    "failing": '<tool_call>{"a":"',
    "failing_names": '<tool_call>{"name": "get_time", <tool_call>',
    "nested": '<tool_call>[{"a": [{',
    "calls": '<tool_call>{"name": "get_time", "arguments": {"a": [1, "b\\n"]}}</tool_call>\n',
    "xml": "<tool_call><function=get_weather>\n<parameter=city>\n<parameter=",
    "glm": "<tool_call>get_time<arg_key>a</arg_key><arg_value>1</arg_value>",
    "sections": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{",
    "special": "</s><|im_end|>a",
    "harmony": "<|channel|>final<|message|>a<|end|><|start|>",
    "quotes": '"',
}


def _work(parser, pieces, monkeypatch):
    """Returns how many functions are called, and how many characters are copied or searched, for an answer."""
    counted = 0
    feed = Source.feed

    def counting_feed(self, piece):
        nonlocal counted
        counted += len(self._text) - self._at + len(piece)
        feed(self, piece)

    def count(frame, event, argument):
        nonlocal counted
        counted += event == "call"

    with monkeypatch.context() as patched:
        patched.setattr(Source, "feed", counting_feed)
        sys.setprofile(count)
        try:
            for piece in pieces:
                parser.push(piece)
            parser.finish()
        finally:
            sys.setprofile(None)
    return counted


HARD_FOR = {"xml": "qwen3_coder", "glm": "glm45", "sections": "deepseek_v3", "harmony": "openai"}


@pytest.mark.parametrize("period", PERIODS)
def test_the_work_grows_with_the_length_of_the_answer_alone(period, monkeypatch):
    tools = HARD_FOR.get(period, "hermes")
    reasoning = "openai_gptoss" if tools == "openai" else "qwen3"
    small, large = (
        _work(
            opened(tools, reasoning, special=("</s>", "<|im_end|>")),
            (PERIODS[period] * size)[:size],
            monkeypatch,
        )
        for size in (400, 1200)
    )
    assert large < 3.6 * small


def test_a_call_that_never_becomes_certain_is_content_from_a_bound_on():
    text = '<tool_call>{"a": "' + "x" * MAX_HELD
    answer = text + '<tool_call>{"name": "get_time"}'
    events = [Content(text), ToolCallBegin(0, "get_time"), ToolCallArguments(0, "{}")]
    assert parsed(opened("hermes"), answer) == events
    pieces = [answer[at : at + 65_521] for at in range(0, len(answer), 65_521)]
    assert parsed(opened("hermes"), *pieces) == events
