"""`/v1/responses` and `/v1/messages` on a fake engine: whole, streamed, refused, and by the published test suites."""

import asyncio
import json

import pytest

from jaxkv.serve.api.app import OPERATIONS
from jaxkv.serve.wire import Failed
from tests.serve.api.schemas import event_faults, faults, message_faults
from tests.serve.http.serving import CHATTY, MODEL, serving

TEXT = "return a + b\n"
IDS = CHATTY.encode(TEXT, add_special=False)
QUESTION = {"model": MODEL, "input": "add a and b"}
TURNS = {
    "model": MODEL,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "add a and b"}],
}


def answers(submit):
    return IDS


def run(test):
    return asyncio.run(asyncio.wait_for(test, 30))


def events_of(text):
    """Returns the JSON of each event of a stream; the end mark is left out."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chatting(script=answers, **options):
    return serving(script, tokenizer=CHATTY, **options)


def test_a_response_is_valid_and_has_the_text():
    async def test():
        async with chatting() as server:
            reply = await server.http.post("/v1/responses", json=QUESTION)
            assert reply.status_code == 200, reply.text
            found = reply.json()
            assert faults("openresponses", found, "ResponseResource") == []
            assert found["output"][0]["content"][0]["text"] == TEXT
            assert found["usage"]["output_tokens"] == len(IDS)

    run(test())


def test_a_streamed_response_equals_the_whole_one():
    async def test():
        async with chatting() as server:
            whole = (await server.http.post("/v1/responses", json=QUESTION)).json()
            reply = await server.http.post("/v1/responses", json=QUESTION | {"stream": True})
            assert reply.headers["content-type"].startswith("text/event-stream")
            made = events_of(reply.text)
            assert event_faults(made) == []
            assert made[0]["type"] == "response.created"
            final = made[-1]["response"]
            assert final["output"][0]["content"] == whole["output"][0]["content"]
            assert final["usage"] == whole["usage"]
            assert reply.text.rstrip().endswith("data: [DONE]")

    run(test())


def test_a_message_is_valid_and_has_the_text():
    async def test():
        async with chatting() as server:
            reply = await server.http.post("/v1/messages", json=TURNS)
            assert reply.status_code == 200, reply.text
            found = reply.json()
            assert faults("anthropic", found, "Message") == []
            assert found["content"] == [{"type": "text", "text": TEXT, "citations": None}]
            assert found["stop_reason"] == "end_turn"

    run(test())


def test_a_streamed_message_equals_the_whole_one():
    async def test():
        async with chatting() as server:
            whole = (await server.http.post("/v1/messages", json=TURNS)).json()
            reply = await server.http.post("/v1/messages", json=TURNS | {"stream": True})
            made = events_of(reply.text)
            assert message_faults(made) == []
            text = "".join(
                each["delta"]["text"] for each in made if each["type"] == "content_block_delta"
            )
            assert text == whole["content"][0]["text"]
            assert made[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]

    run(test())


def test_a_stop_sequence_is_named():
    async def test():
        async with chatting() as server:
            body = TURNS | {"stop_sequences": [" + "]}
            found = (await server.http.post("/v1/messages", json=body)).json()
            assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " + ")
            assert found["content"][0]["text"] == "return a"

    run(test())


def test_a_cut_answer_says_so():
    async def test():
        async with chatting() as server:
            body = QUESTION | {"max_output_tokens": 2}
            found = (await server.http.post("/v1/responses", json=body)).json()
            assert found["status"] == "incomplete"
            found = (await server.http.post("/v1/messages", json=TURNS | {"max_tokens": 2})).json()
            assert found["stop_reason"] == "max_tokens"

    run(test())


def test_tokens_are_counted_as_the_answer_counts_them():
    async def test():
        async with chatting() as server:
            body = {name: TURNS[name] for name in ("model", "messages")}
            counted = (await server.http.post("/v1/messages/count_tokens", json=body)).json()
            found = (await server.http.post("/v1/messages", json=TURNS)).json()
            assert counted == {"input_tokens": found["usage"]["input_tokens"]}
            assert len(server.engine.calls) == 1

    run(test())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"model": "other"}, "model"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format"),
    ],
)
def test_a_refused_response_names_its_own_field(body, named):
    async def test():
        async with chatting() as server:
            reply = await server.http.post("/v1/responses", json=QUESTION | body)
            assert reply.status_code in (400, 404), reply.text
            assert reply.json()["error"]["param"].startswith(named)
            assert not server.engine.calls

    run(test())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"messages": "hi"}, "messages"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ],
)
def test_a_refused_message_has_the_api_s_own_error(body, named):
    async def test():
        async with chatting() as server:
            reply = await server.http.post("/v1/messages", json=TURNS | body)
            assert reply.status_code == 400, reply.text
            found = reply.json()
            assert found["type"] == "error"
            assert found["error"]["type"] == "invalid_request_error"
            assert named in found["error"]["message"]
            assert not server.engine.calls

    run(test())


def test_an_engine_that_is_lost_after_the_first_event_fails_the_response():
    async def test():
        async with chatting(lambda submit: IDS * 9, held=True) as server:
            body = QUESTION | {"stream": True, "max_output_tokens": 99}
            asked = asyncio.create_task(server.http.post("/v1/responses", json=body))
            while not server.engine.running:
                await asyncio.sleep(0)
            for _ in range(5):
                await server.engine.step()
            await asyncio.sleep(0.05)
            await server.engine.send(Failed("broken: secret", 4))
            made = events_of((await asked).text)
            assert made[-1]["type"] == "response.failed"
            assert event_faults(made) == []
            assert "secret" not in json.dumps(made)

    run(test())


def test_the_routes_are_in_the_table():
    paths = {each.path for each in OPERATIONS}
    assert {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"} <= paths
