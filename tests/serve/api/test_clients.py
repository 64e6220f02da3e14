"""The published clients `openai` and `anthropic`, unmodified, on `/v1/responses` and `/v1/messages`."""

import asyncio
from contextlib import asynccontextmanager

import httpx2
import openai
import pytest

from tests.serve.http.serving import CHATTY, MODEL, serving

TEXT = "return a + b\n"
CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
KEY = "key-of-a-tenant"


def script(submit):
    """Calls the tool if the prompt has tools and no result of one; otherwise answers."""
    prompt = CHATTY.decode(submit.ids)
    wants = "tools <tool_call>" in prompt and "<|tool|>" not in prompt
    return CHATTY.encode(CALL if wants else TEXT, add_special=False)


@asynccontextmanager
async def clients():
    """Yields the OpenAI client and the Anthropic client of one server with a key."""
    # Imported here, since it takes two seconds of every process that collects tests.
    import anthropic

    async with serving(script, tokenizer=CHATTY, keys=(KEY,)) as server:
        transport = httpx2.ASGITransport(server.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            options = {"api_key": KEY, "http_client": http, "max_retries": 0}
            yield (
                openai.AsyncOpenAI(base_url="http://server/v1", **options),
                anthropic.AsyncAnthropic(base_url="http://server", **options),
            )


def run(test):
    return asyncio.run(asyncio.wait_for(test, 60))


def test_openai_reads_a_response_and_its_stream():
    async def test():
        async with clients() as (client, _):
            whole = await client.responses.create(model=MODEL, input="add", max_output_tokens=64)
            assert whole.output_text == TEXT
            assert whole.status == "completed"
            async with client.responses.stream(
                model=MODEL, input="add", max_output_tokens=64
            ) as stream:
                pieces = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(pieces) == final.output_text == TEXT

    run(test())


def test_openai_calls_a_tool_and_returns_its_result():
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}

    async def test():
        async with clients() as (client, _):
            asked = [{"role": "user", "content": "weather in Bern?"}]
            options = {"model": MODEL, "tools": [tool], "max_output_tokens": 400}
            first = await client.responses.create(input=asked, **options)
            [said, call] = first.output
            assert said.content[0].text == "Let me see."
            assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            turns = [*asked, *(item.model_dump() for item in first.output), result]
            second = await client.responses.create(input=turns, **options)
            assert second.output_text == TEXT

    run(test())


def test_anthropic_reads_a_message_and_its_stream():
    async def test():
        async with clients() as (_, client):
            turns = [{"role": "user", "content": "add"}]
            options = {"model": MODEL, "max_tokens": 64, "messages": turns}
            whole = await client.messages.create(**options)
            assert whole.content[0].text == TEXT
            assert whole.stop_reason == "end_turn"
            async with client.messages.stream(**options) as stream:
                pieces = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
            assert "".join(pieces) == final.content[0].text == TEXT
            assert final.usage.output_tokens == whole.usage.output_tokens
            counted = await client.messages.count_tokens(model=MODEL, messages=turns)
            assert counted.input_tokens == whole.usage.input_tokens

    run(test())


def test_anthropic_calls_a_tool_and_returns_its_result():
    tool = {"name": "weather", "input_schema": PARAMETERS}

    async def test():
        async with clients() as (_, client):
            turns = [{"role": "user", "content": "weather in Bern?"}]
            options = {"model": MODEL, "max_tokens": 400, "tools": [tool]}
            async with client.messages.stream(messages=turns, **options) as stream:
                first = await stream.get_final_message()
            assert first.stop_reason == "tool_use"
            [said, call] = first.content
            assert said.text == "Let me see."
            assert (call.name, call.input) == ("weather", {"city": "Bern"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
            turns += [
                {"role": "assistant", "content": [each.model_dump() for each in first.content]},
                {"role": "user", "content": [result]},
            ]
            second = await client.messages.create(messages=turns, **options)
            assert second.content[0].text == TEXT

    run(test())


def test_their_errors_are_those_of_the_clients():
    import anthropic

    async def test():
        async with clients() as (theirs, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await theirs.responses.create(model=MODEL, input="a", background=True)
            assert caught.value.param == "background"
            with pytest.raises(openai.NotFoundError):
                await theirs.responses.create(model="other", input="a")
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await client.messages.create(
                    model=MODEL, max_tokens=0, messages=[{"role": "user", "content": "a"}]
                )
            with pytest.raises(anthropic.AuthenticationError):
                await client.with_options(api_key="another").messages.create(
                    model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "a"}]
                )

    run(test())
