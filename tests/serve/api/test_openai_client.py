"""OpenAI's own client, unmodified, against the server."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from tests.serve.api.test_chat import CALL, TOOLS, answers
from tests.serve.http.listening import listening
from tests.serve.http.serving import TOKENIZER

KEY = "key-of-the-client"
MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client(text="hello there, friend", **options):
    async with listening(answers(text), keys=(KEY,), **options) as server:
        given = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
        async with openai.AsyncOpenAI(**given) as made:
            made.server = server
            yield made


def test_chat_completions_whole_and_streamed():
    async def run():
        async with client() as made:
            assert [each.id async for each in made.models.list()] == ["tiny"]
            assert (await made.models.retrieve("tiny")).id == "tiny"
            whole = await made.chat.completions.create(
                model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1
            )
            assert whole.choices[0].message.content == "hello there, friend"
            assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
            async with made.chat.completions.stream(
                model="tiny", messages=MESSAGES, stream_options={"include_usage": True}
            ) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "hello there, friend"
            assert final.usage == whole.usage

    asyncio.run(run())


def test_tool_calls_whole_and_streamed():
    async def run():
        async with client(CALL) as made:
            given = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
            whole = (await made.chat.completions.create(**given)).choices[0]
            async with made.chat.completions.stream(**given) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                assert choice.finish_reason == "tool_calls"
                [call] = choice.message.tool_calls
                assert call.function.name == "weather"
                assert call.function.arguments.replace(" ", "") == '{"city":"Bern"}'

            async def go_on():
                said = whole.message.model_dump()
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"]}
                given["messages"] = [*MESSAGES, said, result | {"content": "sunny"}]
                return await made.chat.completions.create(**given)

            assert (await go_on()).choices[0].finish_reason == "tool_calls"

    asyncio.run(run())


def test_completions_whole_and_streamed():
    async def run():
        async with client() as made:
            given = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "logprobs": 1}
            whole = await made.completions.create(**given, extra_body={"top_k": 5})
            assert [each.text for each in whole.choices] == ["hello there, friend"] * 4
            texts = [""] * 4
            async for chunk in await made.completions.create(**given, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == ["hello there, friend"] * 4

    asyncio.run(run())


def test_errors_have_the_client_s_classes():
    async def run():
        async with client() as made:
            create = made.chat.completions.create
            with pytest.raises(openai.BadRequestError) as error:
                await create(model="tiny", messages=MESSAGES, temperature=3)
            assert error.value.param == "temperature"
            assert error.value.type == "invalid_request_error"
            with pytest.raises(openai.NotFoundError):
                await create(model="other", messages=MESSAGES)
            with pytest.raises(openai.AuthenticationError):
                await made.with_options(api_key="wrong").models.list()
            made.server.service.draining = True
            with pytest.raises(openai.InternalServerError) as error:
                await create(model="tiny", messages=MESSAGES)
            assert error.value.status_code == 503

    asyncio.run(run())


def test_an_error_inside_a_stream_raises_in_the_client():
    async def run():
        async with client(held=True) as made:
            stream = await made.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, max_tokens=10
            )
            engine = made.server.engine
            await engine.step()
            await anext(stream)
            await engine.die()
            with pytest.raises(openai.APIError, match="engine has stopped"):
                [_ async for _ in stream]

    asyncio.run(run())


def test_a_client_that_stops_reading_a_stream_frees_the_engine():
    async def run():
        async with client(held=True) as made:
            stream = await made.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, max_tokens=10
            )
            engine = made.server.engine
            assert len(TOKENIZER.encode("hello there, friend")) > 1
            await engine.step()
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(20):
                while engine.running:
                    await asyncio.sleep(0.01)
            assert engine.client.num_open == 0

    asyncio.run(run())
