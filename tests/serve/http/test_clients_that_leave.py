import asyncio
import json
import socket

import msgspec
import pytest

from jaxkv.serve.engine_client import MAX_UNREAD_TOKENS
from jaxkv.serve.http.limits import Limits
from tests.serve.fake_engine import FACTS
from tests.serve.http.listening import listening
from tests.serve.http.serving import events_of, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def raw(path, **fields):
    given = {"model": "tiny", "max_tokens": 500, **fields}
    if path == CHAT:
        given["messages"] = [{"role": "user", "content": "hello"}]
    else:
        given["prompt"] = [5] * 20
    body = json.dumps(given).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3], ids=["before the first token", "between tokens"])
def test_a_client_that_leaves_is_aborted_at_once(path, stream, steps):
    async def run():
        async with listening(lambda submit: [5] * 100, held=True) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(raw(path, stream=stream, n=2))
            await until(lambda: server.engine.running)
            for _ in range(steps):
                await server.engine.step()
            writer.transport.abort()
            await until(lambda: server.engine.aborted)
            await until(lambda: not server.engine.running)
            assert server.engine.client.num_open == 0
            await until(lambda: not server.uvicorn.server_state.tasks)

    asyncio.run(run())


def test_a_client_that_leaves_while_its_prompts_wait_aborts_all_of_them():
    async def run():
        async with listening(lambda submit: [5] * 100, held=True) as server:
            body = json.dumps({"model": "tiny", "prompt": [[5], [6], [7]]}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            await until(lambda: len(server.engine.running) == 3)
            writer.transport.abort()
            await until(lambda: not server.engine.running)
            assert server.engine.client.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0.2, 1000.0], ids=["by time", "by unread tokens"])
def test_a_reader_that_takes_nothing_is_aborted(seconds):
    tokens = 2 * MAX_UNREAD_TOKENS
    facts = msgspec.structs.replace(FACTS, max_model_len=10 * tokens)

    async def run():
        limits = Limits(write_seconds=seconds)
        async with listening(
            lambda submit: [5] * tokens, limits=limits, held=True, facts=facts
        ) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
                client.connect(("127.0.0.1", server.port))
                client.sendall(raw(COMPLETIONS, stream=True, max_tokens=tokens))
                await until(lambda: server.engine.running)
                while server.engine.running:
                    await server.engine.step()
                    await asyncio.sleep(0)
                await until(lambda: server.engine.client.num_open == 0)
                assert server.engine.aborted
                if seconds < 1:
                    await until(lambda: not server.uvicorn.server_state.connections)

    asyncio.run(run())


def test_a_full_queue_is_429_with_retry_after_and_takes_requests_again_later():
    async def run():
        limits = Limits(most_waiting=2, retry_after_seconds=3)
        async with serving(lambda submit: [5, 6], held=True, limits=limits) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 4}
            tasks = [
                asyncio.create_task(server.http.post(COMPLETIONS, json=given)) for _ in range(10)
            ]
            await until(lambda: len(server.engine.running) == 10)
            for stream in (False, True):
                reply = await server.http.post(COMPLETIONS, json=given | {"stream": stream})
                assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
                assert reply.json()["error"]["code"] == "queue_full"
            assert (await server.http.get("/ready")).status_code == 429
            while server.engine.running:
                await server.engine.step()
            assert {(await task).status_code for task in tasks} == {200}
            assert (await server.http.get("/ready")).status_code == 200

    asyncio.run(run())


def test_ten_times_too_many_requests_cost_the_engine_nothing_and_delay_nobody():
    fits = FACTS.max_sequences + 2
    given = {"model": "tiny", "prompt": [5], "max_tokens": 4}

    async def run():
        async with serving(
            lambda submit: [5, 6, 7], held=True, limits=Limits(most_waiting=2)
        ) as server:

            def send(count):
                posts = [server.http.post(COMPLETIONS, json=given) for _ in range(count)]
                return [asyncio.create_task(post) for post in posts]

            async def steps_of(tasks):
                steps = 0
                await until(lambda: len(server.engine.running) == len(tasks))
                while server.engine.running:
                    await server.engine.step()
                    steps += 1
                assert {(await task).status_code for task in tasks} == {200}
                return steps

            alone = await steps_of(send(1))
            admitted = send(fits)
            await until(lambda: len(server.engine.running) == fits)
            # The engine takes no step until all of them have their answer.
            refused = await asyncio.gather(*send(9 * fits))
            assert {reply.status_code for reply in refused} == {429}
            assert len(server.engine.calls) == 1 + fits
            assert await steps_of(admitted) == alone
            assert await steps_of(send(1)) == alone

    asyncio.run(run())


def test_hundreds_of_streams_that_are_left_are_all_aborted_before_the_next_step():
    async def run():
        limits = Limits(most_waiting=300)
        async with listening(lambda submit: [5] * 100, held=True, limits=limits) as server:
            begun = [asyncio.open_connection("127.0.0.1", server.port) for _ in range(300)]
            connections = await asyncio.gather(*begun)
            for _, writer in connections:
                writer.write(raw(COMPLETIONS, stream=True))
            await until(lambda: len(server.engine.running) == 300)
            await server.engine.step()
            for _, writer in connections:
                writer.transport.abort()
            await until(lambda: not server.engine.running)
            assert len(server.engine.aborted) == 300
            assert server.engine.client.num_open == 0
            await until(lambda: not server.uvicorn.server_state.tasks)

    asyncio.run(run())


def test_each_sample_takes_a_place_until_it_ends():
    async def run():
        limits = Limits(most_waiting=2)
        async with serving(lambda submit: [5, 6], held=True, limits=limits) as server:
            engine, given = server.engine, {"model": "tiny", "prompt": [5], "max_tokens": 2}
            first = asyncio.create_task(server.http.post(COMPLETIONS, json=given | {"n": 7}))
            await until(lambda: len(engine.running) == 7)
            reply = await server.http.post(COMPLETIONS, json=given | {"n": 4})
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
            reply = await server.http.post(COMPLETIONS, json=given | {"prompt": [[5], [6]], "n": 2})
            assert reply.status_code == 429
            second = asyncio.create_task(server.http.post(COMPLETIONS, json=given | {"n": 3}))
            await until(lambda: len(engine.running) == 10)
            assert (await server.http.get("/ready")).status_code == 429
            while engine.running:
                await engine.step()
            assert {(await task).status_code for task in (first, second)} == {200}
            assert engine.client.num_open == 0
            reply = await server.http.post(COMPLETIONS, json=given | {"n": 11})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")

    asyncio.run(run())


def test_a_request_out_of_time_is_504_and_aborted():
    async def run():
        limits = Limits(request_seconds=0.1)
        async with serving(lambda submit: [5, 6, 7], held=True, limits=limits) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 4}
            reply = await server.http.post(COMPLETIONS, json=given)
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
            await until(lambda: len(server.engine.aborted) == 1)

    asyncio.run(run())


def test_a_stream_out_of_time_ends_with_an_error_event_and_is_aborted():
    async def run():
        # Long enough for a busy machine to bring the first token.
        limits = Limits(request_seconds=3.0)
        async with serving(lambda submit: [5, 6, 7], held=True, limits=limits) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 4, "stream": True}
            posting = asyncio.create_task(server.http.post(COMPLETIONS, json=given))
            await until(lambda: server.engine.running)
            await server.engine.step()
            reply = await posting
            assert reply.status_code == 200
            *_, error, end = reply.text.split("\n\n")
            assert error.startswith("event: error\ndata: ")
            assert json.loads(error.partition("data: ")[2])["error"]["code"] == "request_timeout"
            assert end == ""
            assert "[DONE]" not in reply.text
            await until(lambda: len(server.engine.aborted) == 1)

    asyncio.run(run())


def test_an_engine_that_dies_ends_streams_with_an_error_event_and_replies_with_503():
    async def run():
        async with serving(lambda submit: [5, 6, 7], held=True) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 4}
            posting = [
                asyncio.create_task(server.http.post(COMPLETIONS, json=given | {"stream": stream}))
                for stream in (False, True)
            ]
            await until(lambda: len(server.engine.running) == 2)
            await server.engine.step()
            await asyncio.sleep(0.05)
            await server.engine.die()
            whole, stream = await asyncio.gather(*posting)
            assert whole.status_code == 503
            assert stream.status_code == 200
            assert "event: error" in stream.text
            assert "engine_unavailable" in stream.text

    asyncio.run(run())


def test_a_silent_stream_gets_comments():
    async def run():
        limits = Limits(keep_alive_seconds=0.05)
        async with serving(lambda submit: [5, 6], held=True, limits=limits) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 4, "stream": True}
            posting = asyncio.create_task(server.http.post(COMPLETIONS, json=given))
            await until(lambda: server.engine.running)
            await server.engine.step()
            await asyncio.sleep(0.3)
            await server.engine.step()
            text = (await posting).text
            assert text.count(": keep-alive\n\n") >= 2
            events_of(text.replace(": keep-alive\n\n", ""))

    asyncio.run(run())


def test_keys_keep_cached_pages_apart_and_one_key_shares_them():
    async def run():
        keys = ("key-of-the-first", "key-of-the-second")
        async with serving(lambda submit: [5], keys=keys) as server:
            given = {"model": "tiny", "prompt": [5]}
            for key in keys:
                headers = {"authorization": f"Bearer {key}"}
                for salt in ({}, {}, {"cache_salt": "a"}):
                    await server.http.post(COMPLETIONS, json=given | salt, headers=headers)
            salts = [call.salt for call in server.engine.calls.values()]
            assert salts[0] == salts[1] != salts[2]
            assert salts[3] == salts[4] != salts[5]
            assert None not in salts
            assert not set(salts[:3]) & set(salts[3:])

    asyncio.run(run())
