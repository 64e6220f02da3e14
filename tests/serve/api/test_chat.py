import asyncio
import json

import pytest
import tokenizers

from jaxkv.serve.api.chat_turn import reasoning_share
from jaxkv.serve.generation import Delta
from jaxkv.serve.parsers.events import Content, Reasoning
from jaxkv.text.tokenizer import Tokenizer
from tests.serve.http.serving import CHATTY, TOKENIZER, events_of, serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PATH = "/v1/chat/completions"


def body(**fields):
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "tiny", "messages": messages, "max_completion_tokens": 400, **fields}


def answers(text):
    """Returns a script that generates a text."""
    return lambda submit: TOKENIZER.encode(text, add_special=False)


def chatting(text="hello there", **options):
    return serving(answers(text), tokenizer=CHATTY, **options)


def test_an_answer_has_message_finish_reason_and_usage():
    async def run():
        async with chatting() as server:
            reply = await server.http.post(PATH, json=body())
            assert reply.status_code == 200, reply.text
            [choice] = reply.json()["choices"]
            assert choice["message"] == {
                "role": "assistant",
                "content": "hello there",
                "refusal": None,
            }
            assert choice["finish_reason"] == "stop"
            [call] = server.engine.calls.values()
            assert TOKENIZER.decode(call.ids) == "<|user|>hello\n<|assistant|>"
            assert reply.json()["usage"]["prompt_tokens"] == len(call.ids)

    asyncio.run(run())


def test_more_least_tokens_than_the_context_has_room_for_are_refused():
    prompt = TOKENIZER.encode("<|user|>hello\n<|assistant|>", add_special=False)

    async def run():
        async with chatting() as server:
            room = server.service.facts.max_model_len - len(prompt)
            given = body(max_completion_tokens=None, min_tokens=room)
            assert (await server.http.post(PATH, json=given)).status_code == 200
            reply = await server.http.post(PATH, json=given | {"min_tokens": room + 1})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "min_tokens")
            assert error["code"] == "context_length_exceeded"
            assert f"{room + 1} more were asked for" in error["message"]
            assert len(server.engine.calls) == 1

    asyncio.run(run())


def test_a_stream_begins_with_the_role_and_ends_with_its_reason_usage_and_done():
    async def run():
        async with chatting() as server:
            given = body(stream=True, stream_options={"include_usage": True}, n=2)
            reply = await server.http.post(PATH, json=given)
            *chunks, usage = events_of(reply.text)
            for sample in (0, 1):
                own = [
                    each["choices"][0] for each in chunks if each["choices"][0]["index"] == sample
                ]
                first, *middle, last = own
                assert first["delta"] == {"role": "assistant", "content": ""}
                assert "".join(each["delta"]["content"] for each in middle) == "hello there"
                assert all(each["finish_reason"] is None for each in (first, *middle))
                assert (last["delta"], last["finish_reason"]) == ({}, "stop")
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 2 * len(TOKENIZER.encode("hello there"))

    asyncio.run(run())


def test_tool_calls_are_read_whole_and_as_deltas():
    async def run():
        async with chatting(f"let me see\n{CALL}") as server:
            given = body(tools=TOOLS)
            [choice] = (await server.http.post(PATH, json=given)).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "let me see"
            [call] = choice["message"]["tool_calls"]
            assert call["id"].startswith("call_")
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}

            reply = await server.http.post(PATH, json=given | {"stream": True})
            deltas = [each["choices"][0] for each in events_of(reply.text)]
            entries = [entry for each in deltas for entry in each["delta"].get("tool_calls", ())]
            assert {entry["index"] for entry in entries} == {0}
            assert [entry["function"].get("name") for entry in entries if "id" in entry] == [
                "weather"
            ]
            arguments = "".join(entry["function"]["arguments"] for entry in entries)
            assert json.loads(arguments) == {"city": "Bern"}
            assert deltas[-1]["finish_reason"] == "tool_calls"

    asyncio.run(run())


def test_parallel_tool_calls_false_returns_the_first_call():
    async def run():
        async with chatting(f"{CALL}\n{CALL}") as server:
            for parallel, count in ((True, 2), (False, 1)):
                given = body(tools=TOOLS, parallel_tool_calls=parallel)
                [choice] = (await server.http.post(PATH, json=given)).json()["choices"]
                assert len(choice["message"]["tool_calls"]) == count

    asyncio.run(run())


def test_reasoning_is_apart_from_content_and_can_be_left_out():
    async def run():
        async with chatting("<think>\nhmm\n</think>\n\nyes") as server:
            for given in (body(), body(stream=True)):
                reply = await server.http.post(PATH, json=given)
                replies = events_of(reply.text) if given.get("stream") else [reply.json()]
                said = [c.get("delta") or c.get("message") for r in replies for c in r["choices"]]
                for name, text in (
                    ("reasoning", "hmm"),
                    ("reasoning_content", "hmm"),
                    ("content", "yes"),
                ):
                    found = "".join(each.get(name) or "" for each in said if each)
                    assert found.strip() == text, name
            reply = await server.http.post(PATH, json=body(include_reasoning=False))
            [choice] = reply.json()["choices"]
            assert "reasoning" not in choice["message"]
            details = reply.json()["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("events", "text", "tokens"),
    [
        ([Reasoning("think")], "think", 8),
        ([Reasoning("hmm"), Content("hello")], "hmm</think>hello", 2),
        ([Reasoning("longer than its text")], "short", 8),
        ([Reasoning("longer than its text"), Content("x")], "short", 8),
        ([Content("hello")], "hello", 0),
        ([], "<thi", 0),
    ],
)
def test_tokens_of_reasoning_and_other_text_count_by_their_characters(events, text, tokens):
    assert reasoning_share(events, Delta(sample=0, text=text, ids=tuple(range(8)))) == tokens


def test_logprobs_list_each_token_with_its_bytes_and_the_likeliest():
    async def run():
        async with chatting("wörld") as server:
            given = body(logprobs=True, top_logprobs=1)
            [choice] = (await server.http.post(PATH, json=given)).json()["choices"]
            found = choice["logprobs"]["content"]
            assert bytes(b for each in found for b in each["bytes"]).decode() == "wörld"
            assert [each["logprob"] for each in found] == [-0.5] * len(found)
            assert all(len(each["top_logprobs"]) == 1 for each in found)
            reply = await server.http.post(PATH, json=given | {"stream": True})
            streamed = [
                entry
                for each in events_of(reply.text)
                for entry in (each["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert streamed == found

    asyncio.run(run())


def test_token_ids_are_returned_where_vllm_has_them_and_no_stream_loses_any():
    text = f"<think>hmm</think>ö, let me see\n{CALL}"
    ids = TOKENIZER.encode(text, add_special=False)

    async def run():
        async with chatting(text) as server:
            given = body(tools=TOOLS, return_token_ids=True)
            whole = (await server.http.post(PATH, json=given)).json()
            [call] = server.engine.calls.values()
            assert whole["prompt_token_ids"] == call.ids
            assert whole["choices"][0]["token_ids"] == ids
            reply = await server.http.post(PATH, json=given | {"stream": True, "n": 2})
            chunks = events_of(reply.text)
            for sample in (0, 1):
                own = [each for each in chunks if each["choices"][0]["index"] == sample]
                assert own[0]["prompt_token_ids"] == call.ids
                assert not any("prompt_token_ids" in each for each in own[1:])
                found = [each["choices"][0].get("token_ids", ()) for each in own]
                assert [token for each in found for token in each] == ids

    asyncio.run(run())


def test_messages_reach_the_template_with_parts_joined_and_arguments_as_objects():
    async def run():
        async with chatting() as server:
            messages = [
                {"role": "developer", "content": "be kind"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city":"Bern"}'},
                        },
                        {"id": "call_2", "function": {"name": "time", "arguments": ""}},
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ]
            given = body(messages=messages, chat_template_kwargs={"greeting": "hi"})
            reply = await server.http.post(PATH, json=given)
            assert reply.status_code == 200, reply.text
            [call] = server.engine.calls.values()
            assert TOKENIZER.decode(call.ids) == (
                '<|system|>be kind\n<|user|>a\nb\n<|assistant|>\nweather({"city": "Bern"})\n'
                "time({})\n<|tool|>sunny\n<|assistant|>hi"
            )

    asyncio.run(run())


def test_tools_are_in_the_prompt_unless_the_choice_is_none():
    async def run():
        async with chatting() as server:
            for choice, expected in (("auto", True), ("none", False)):
                await server.http.post(PATH, json=body(tools=TOOLS, tool_choice=choice))
                *_, call = server.engine.calls.values()
                assert ("weather" in TOKENIZER.decode(call.ids)) is expected

    asyncio.run(run())


def test_a_model_without_a_template_refuses_conversations():
    async def run():
        async with serving() as server:
            reply = await server.http.post(PATH, json=body())
            assert reply.status_code == 400
            assert "chat template" in reply.json()["error"]["message"]

    asyncio.run(run())


def test_demanded_forms_reach_the_engine():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    cases = (
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema, "strict": True},
                }
            },
            "json",
        ),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
        ({"guided_json": schema}, "json"),
        ({"guided_grammar": 'start: "a"'}, "grammar"),
        ({"tools": TOOLS, "tool_choice": "required"}, "json"),
    )

    async def run():
        async with chatting('{"a": 1}') as server:
            for given, kind in cases:
                reply = await server.http.post(PATH, json=body(**given))
                assert reply.status_code == 200, reply.text
                *_, call = server.engine.calls.values()
                assert list(call.sampling["structured_outputs"]) == [kind], given
            before = len(server.engine.calls)
            for wrong in (
                {"guided_regex": "a", "guided_choice": ["a"]},
                {"structured_outputs": {}},
                {"structured_outputs": {"regex": "a", "choice": ["a"]}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
                {"tools": [*TOOLS, *TOOLS], "tool_choice": "required"},
            ):
                reply = await server.http.post(PATH, json=body(**wrong))
                assert reply.status_code == 400, wrong
                assert reply.json()["error"]["param"] in (*wrong, "tool_choice")
            assert len(server.engine.calls) == before

    asyncio.run(run())


def test_a_demanded_call_is_read_from_its_arguments_alone():
    async def run():
        async with chatting('{"city": "Bern"}') as server:
            choice = {"type": "function", "function": {"name": "weather"}}
            given = body(tools=TOOLS, tool_choice=choice)
            [found] = (await server.http.post(PATH, json=given)).json()["choices"]
            [call] = found["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
            assert found["finish_reason"] == "tool_calls"

    asyncio.run(run())


def with_tokens(*texts):
    """Returns the tokenizer of these tests with more tokens, and their ids."""
    library = tokenizers.Tokenizer.from_str(CHATTY.to_json())
    library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    made = Tokenizer(library, chat_template=CHATTY.chat_template)
    return made, [library.token_to_id(text) for text in texts]


def test_a_demanded_form_begins_behind_the_reasoning_unless_none_is_wanted():
    tokenizer, [begin, end] = with_tokens("<think>", "</think>")
    given = {"response_format": {"type": "json_object"}}

    async def run():
        async with serving(answers('<think>hm</think>{"a": 1}'), tokenizer=tokenizer) as server:
            for more in ({}, {"tools": TOOLS}):
                reply = await server.http.post(PATH, json=body(**given, **more))
                [found] = reply.json()["choices"]
                assert found["message"]["reasoning"] == "hm"
                assert found["message"]["content"] == '{"a": 1}'
                *_, call = server.engine.calls.values()
                assert call.sampling["structured_outputs"] == {
                    "json_object": True,
                    "reasoning": {"ends": [end], "begins": [begin], "header": []},
                }
            reply = await server.http.post(PATH, json=body(**given, reasoning_effort="none"))
            [found] = reply.json()["choices"]
            assert found["message"]["content"] == '<think>hm</think>{"a": 1}'
            *_, call = server.engine.calls.values()
            assert call.sampling["structured_outputs"] == {"json_object": True}

    asyncio.run(run())


def test_a_demanded_form_of_harmony_is_the_final_message_and_a_demanded_call_is_refused():
    names = ("<|channel|>", "final", "<|message|>")
    tokenizer, [channel, final, message] = with_tokens(*names)
    text = '<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>{"a": "<|end|>"}'

    async def run():
        async with serving(answers(text), tokenizer=tokenizer) as server:
            server.service.reasoning_parser = "openai_gptoss"
            server.service.tool_parser = "openai"
            given = body(response_format={"type": "json_object"})
            [found] = (await server.http.post(PATH, json=given)).json()["choices"]
            assert found["message"]["reasoning"] == "hm"
            assert found["message"]["content"] == '{"a": "<|end|>"}'
            [call] = server.engine.calls.values()
            assert call.sampling["structured_outputs"]["reasoning"] == {
                "ends": [message],
                "begins": [],
                "header": [channel, final],
            }
            given = body(tools=TOOLS, tool_choice="required")
            reply = await server.http.post(PATH, json=given)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")

    asyncio.run(run())
