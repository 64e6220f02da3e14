"""Where reasoning begins and ends, by the answer, the prompt and the request."""

import pytest

from jaxkv.serve.parsers.events import Content, Reasoning
from tests.serve.parsers.examples import PARIS, call, opened, parsed

TURN = "<|im_start|>assistant\n"
SPECIAL = ("<|im_start|>", "<|im_end|>")


def split(text, prompt_end="", thinking=None, special=SPECIAL, reasoning="qwen3"):
    return parsed(opened(None, reasoning, prompt_end, special, thinking=thinking), text)


def test_an_answer_that_begins_with_the_marker_has_reasoning():
    assert split("\n<think>\nHm.\n\n</think>\n\n  Yes.") == [Reasoning("Hm."), Content("  Yes.")]


def test_empty_reasoning_is_no_event():
    assert split("<think>\n\n</think>\n\nYes.") == [Content("Yes.")]


def test_a_marker_later_in_the_answer_is_content():
    text = "Write <think>x</think>."
    assert split(text, TURN) == [Content(text)]


@pytest.mark.parametrize(
    "prompt_end", ["<think>", "<think>\n", "<think>\nSo the", "</think>\n<think>"]
)
def test_reasoning_that_the_prompt_began_goes_on(prompt_end):
    assert split("Hm.</think>Yes.", TURN + prompt_end) == [Reasoning("Hm."), Content("Yes.")]


def test_a_second_marker_behind_the_prompts_is_no_text():
    assert split("<think>Hm.</think>Yes.", TURN + "<think>\n") == [
        Reasoning("Hm."),
        Content("Yes."),
    ]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_reasoning_that_the_prompt_ended_is_over(thinking):
    for prompt_end in ("<think>\n\n</think>\n\n", "</think>"):
        assert split("Yes.", TURN + prompt_end, thinking) == [Content("Yes.")]


def test_a_marker_in_an_earlier_turn_begins_nothing():
    prompt = "<|im_start|>user\nWhat is <think>?<|im_end|>\n" + TURN
    assert split("A tag.", prompt) == [Content("A tag.")]


def test_without_special_tokens_a_marker_must_end_the_prompt():
    assert split("Yes.", "What is <think>? ", special=()) == [Content("Yes.")]
    assert split("Hm.", "Assistant: <think>\n", special=()) == [Reasoning("Hm.")]


def test_a_model_that_is_asked_to_think_may_leave_out_the_marker():
    assert split("Hm.</think>Yes.", TURN, thinking=True) == [Reasoning("Hm."), Content("Yes.")]
    assert split("Yes.", TURN, thinking=False) == [Content("Yes.")]
    assert split("Yes.", TURN, thinking=True, reasoning="mistral") == [Content("Yes.")]


def test_reasoning_that_max_tokens_cut_off_stays_reasoning():
    assert split("<think>\nHm. </thi") == [Reasoning("Hm. </thi")]


def test_both_wordings_of_granite_are_known():
    text = "Here's my thought process: Hm. Here's my response: Yes."
    assert split(text, reasoning="granite") == [Reasoning(" Hm."), Content(" Yes.")]


def test_without_a_reasoning_parser_markers_are_content():
    text = "<think>Hm.</think>Yes."
    assert parsed(opened("hermes"), text) == [Content(text)]


CALL = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'


def test_a_call_ends_the_reasoning_of_qwen3():
    events = parsed(opened("hermes", "qwen3"), f"<think>A <tool_call>? Yes.\n{CALL}\nDone.")
    assert events == [
        Reasoning("A <tool_call>? Yes."),
        *call(0, "get_weather", PARIS),
        Content("Done."),
    ]


def test_a_call_in_the_reasoning_of_others_is_text():
    text = f"Like {CALL}, or"
    assert parsed(opened("hermes", "deepseek_r1"), f"<think>{text}") == [Reasoning(text)]
    assert parsed(opened("hermes", "qwen3", tool_choice="none"), f"<think>{text}") == [
        Reasoning(text)
    ]


def test_what_follows_a_call_that_ends_the_reasoning_is_content():
    text = '<think>A<tool_call>{"name": "get_time", "arguments": {}, oops}</tool_call>'
    assert parsed(opened("hermes", "qwen3"), text) == [
        Reasoning("A"),
        *call(0, "get_time", "{}"),
        Content(", oops}"),
    ]
