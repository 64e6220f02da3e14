"""Requests of `/v1/responses` and `/v1/messages`, read as chat requests."""

import pytest

from jaxkv.serve.api import messages_request, responses_request
from jaxkv.serve.http.errors import ApiError

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def responses(**fields):
    return responses_request.as_chat({"model": "m", "input": "hi"} | fields)


def messages(**fields):
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    return messages_request.as_chat(body | fields)


def test_a_text_is_a_message_of_the_user():
    chat = responses(instructions="be short", max_output_tokens=5, temperature=0.5)
    assert chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "hi"},
        ],
        "max_completion_tokens": 5,
        "temperature": 0.5,
    }


@pytest.mark.parametrize("made", [responses, messages])
def test_logits_processors_are_named_as_in_chat(made):
    calls = {"mine": {"low": 3}}
    assert made(logits_processors=calls)["logits_processors"] == calls


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "message", "role": "assistant", "phase": "final_answer", "content": "c"},
    ]
    made = responses(input=items)["messages"]
    assert [message["role"] for message in made] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert made[1]["content"] == "b"
    assert made[1]["reasoning_content"] == "r"
    assert [call["id"] for call in made[1]["tool_calls"]] == ["1", "2"]
    assert made[2] == {"role": "tool", "tool_call_id": "1", "content": "x"}
    assert (made[4]["content"], made[4]["reasoning_content"]) == ("c", "s")


def test_tools_and_formats_are_those_of_chat():
    chat = responses(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        reasoning={"effort": "low", "summary": "auto"},
    )
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }
    assert (chat["logprobs"], chat["top_logprobs"], chat["reasoning_effort"]) == (True, 3, "low")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": "yes"}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        responses(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_blocks_become_messages():
    chat = messages(
        system=[{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "y"},
                    {"type": "text", "text": "c"},
                ],
            },
        ],
    )
    assert chat["max_completion_tokens"] == 8
    assert chat["stop"] == ["END"]
    assert chat["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "y"},
        {"role": "user", "content": "c"},
    ]


def test_a_last_message_of_the_assistant_is_continued():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]
    chat = messages(messages=turns)
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_the_choice_of_a_tool_is_that_of_chat(choice, wanted):
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    chat = messages(tools=tools, tool_choice=choice)
    assert chat["tool_choice"] == wanted
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        }
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_a_field_of_a_message_that_cannot_be_served_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        messages(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_thinking_is_switched_in_the_template():
    assert messages(thinking={"type": "disabled"})["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    assert "chat_template_kwargs" not in messages()
