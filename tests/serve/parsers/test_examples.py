"""Answers as models write them give the events that a client expects, however they arrive."""

import json
import re

import pytest

from jaxkv.serve.parsers.events import ToolCallArguments, ToolCallBegin
from jaxkv.serve.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.serve.parsers.examples import EXAMPLES, joined, parsed

by_name = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def test_every_format_has_an_example():
    assert {example.tools for example in EXAMPLES} >= {*TOOL_FORMATS}
    named = {example.reasoning for example in EXAMPLES}
    assert named | {"deepseek_r1"} >= {*REASONING_FORMATS}


@by_name
def test_an_answer_in_one_piece_gives_its_events(example):
    assert parsed(example.opened(), example.text) == example.events


@by_name
def test_an_answer_in_single_characters_gives_the_same_events_and_takes_none_back(example):
    parser, events = example.opened(), []
    for character in example.text:
        events = joined([*events, *parser.push(character)])
        assert len(events) <= len(example.events)
        for event, whole in zip(events, example.events, strict=False):
            assert type(event) is type(whole)
            assert event == whole or whole.text.startswith(event.text)
    assert joined([*events, *parser.finish()]) == example.events


@by_name
def test_an_answer_cut_in_two_gives_the_same_events(example):
    for cut in range(len(example.name) % 11, len(example.text), 11):
        pieces = example.text[:cut], example.text[cut:]
        assert parsed(example.opened(), *pieces) == example.events, pieces


@by_name
def test_an_answer_cut_off_by_max_tokens_has_a_beginning_of_the_same_calls(example):
    names = [event for event in example.events if isinstance(event, ToolCallBegin)]
    texts = [event.text for event in example.events if isinstance(event, ToolCallArguments)]
    tokens = re.compile("|".join(map(re.escape, example.special)) or "$")
    inside = {at for found in tokens.finditer(example.text) for at in range(*found.span())}
    for cut in range(len(example.name) % 5, len(example.text), 5):
        if cut in inside:
            continue
        events = parsed(example.opened(), example.text[:cut])
        begun = [event for event in events if isinstance(event, ToolCallBegin)]
        assert begun == names[: len(begun)]
        found = [event for event in events if isinstance(event, ToolCallArguments)]
        for event in found:
            # A string may end with the beginning of its end marker, which could be text.
            assert texts[event.index].startswith(re.sub(r"(\\n)?(</?[^>]*)?$", "", event.text))
            if event is not found[-1]:
                json.loads(event.text)


def test_arguments_are_emitted_as_they_arrive():
    for example in EXAMPLES:
        calls = [event for event in example.events if isinstance(event, ToolCallArguments)]
        if not calls or "text" in example.name or "order" in example.name:
            continue
        parser = example.opened()
        pieces = [
            event
            for character in example.text
            for event in parser.push(character)
            if isinstance(event, ToolCallArguments) and event.index == 0
        ]
        assert len(pieces) >= 5, example.name
