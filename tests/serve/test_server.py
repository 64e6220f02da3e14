"""The life of the two processes: start, signals, drain, deaths and exit codes, with an engine without a model."""

import asyncio
import os
import signal

import httpx
import pytest

from jaxkv import SamplingParams
from jaxkv.serve import exit_codes
from jaxkv.serve.engine_client import EngineLost
from jaxkv.serve.engine_process import EngineProcess
from jaxkv.serve.http.errors import ApiError
from jaxkv.serve.server import EngineRefused
from jaxkv.serve.wire import Start
from tests.serve.running import kill, run, server

ENDLESS = 1_000
PROGRAM = "tests.serve.quick_engine"


class Lines:
    """The smallest application that generates: `/N` streams N tokens as lines, and "lost" if the engine is."""

    def __init__(self, service):
        self._service = service

    async def __call__(self, scope, receive, send):
        await receive()
        params = SamplingParams(max_tokens=int(scope["path"][1:]), ignore_eos=True)
        try:
            made = self._service.begin([1], params)
        except ApiError as error:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await begin(send, error.status, headers)
            await say(send, error.code, more=False)
            return
        await begin(send, 200, [])
        try:
            while new := await made.deltas():
                await say(send, "token\n" * sum(len(delta.ids) for delta in new))
            await say(send, "end\n", more=False)
        except EngineLost:
            await say(send, "lost\n", more=False)
        finally:
            made.abort()


async def begin(send, status, headers):
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def say(send, text, *, more=True):
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def text_of(running, tokens):
    """Returns the status and text of a request."""
    async with httpx.AsyncClient(timeout=30) as http:
        reply = await http.get(f"{running.url}/{tokens}")
        return reply.status_code, reply.text


async def begun(running, tokens):
    """Begins a request; returns the task that waits for its text, once the engine has it."""
    before = running.client.num_open
    task = asyncio.create_task(text_of(running, tokens))
    while running.client.num_open == before and running.client.failure is None:
        await asyncio.sleep(0.001)
    return task


def quick(what="serves", **options):
    return server(Start(model=what), PROGRAM, app=Lines, **options)


def test_requests_in_progress_end_after_a_signal_and_new_ones_are_refused():
    async def test():
        async with quick() as running:
            texts = [await begun(running, 200) for _ in range(3)]
            kill()
            await running.draining()
            async with httpx.AsyncClient() as http:
                reply = await http.get(f"{running.url}/1")
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) > 0
            for text in texts:
                assert await text == (200, "token\n" * 200 + "end\n")
            assert await running.ended == exit_codes.OK
            with pytest.raises(httpx.ConnectError):
                await text_of(running, 1)

    run(test)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_left_at_the_deadline_or_a_second_signal_gets_an_error(again):
    async def test():
        async with quick(drain_seconds=60.0 if again else 0.05) as running:
            text = await begun(running, ENDLESS)
            kill(signal.SIGINT)
            if again:
                await running.draining()
                kill(signal.SIGTERM)
            status, lines = await text
            assert status == 200
            assert lines.endswith("token\nlost\n")
            assert await running.ended == exit_codes.OK

    run(test)


def test_a_signal_while_the_model_loads_ends_the_quick():
    async def test():
        async with quick("loads for ever", ready=False) as running:
            assert await text_of(running, 1) == (503, "loading")
            kill()
            assert await running.ended == exit_codes.OK

    run(test)


def test_a_model_that_is_refused_is_an_error_with_the_engines_words():
    async def test():
        async with quick("refuses", ready=False) as running:
            with pytest.raises(EngineRefused, match="there is no such model"):
                await running.ended

    run(test)


def test_a_tokenizer_that_cannot_be_read_is_an_error():
    async def test():
        async with quick("has no tokenizer to read", ready=False) as running:
            with pytest.raises((ValueError, OSError), match="no/such/directory"):
                await running.ended

    run(test)


def test_an_engine_that_ends_while_it_loads_ends_the_quick():
    async def test():
        async with quick("crashes", ready=False) as running:
            assert await running.ended == exit_codes.FAILED

    run(test)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("is killed", exit_codes.FAILED),
        ("hangs", exit_codes.HUNG),
        ("loses its memory without a word", exit_codes.OUT_OF_MEMORY),
    ],
)
def test_an_engine_that_ends_ends_the_server_and_its_code_is_the_servers(what, code):
    async def test():
        async with quick(what) as running:
            status, lines = await text_of(running, ENDLESS)
            assert status == 200
            assert lines.endswith("lost\n")
            assert await running.ended == code

    run(test)


def test_an_engine_that_does_not_end_is_killed():
    async def test():
        engine = EngineProcess(Start(model="does not listen"), program="tests.serve.quick_engine")
        engine.client.start()
        await engine.client.ready()
        engine.client.submit([1], SamplingParams())
        await asyncio.sleep(0)
        await engine.end(0.05)
        assert not os.path.exists(f"/proc/{engine._process.pid}")

    run(test)
