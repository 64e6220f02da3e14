"""The HTTP process's end of the socket, against a fake engine."""

import asyncio

import pytest

from jaxkv import SamplingParams
from jaxkv.serve import engine_client
from jaxkv.serve.engine_client import EngineLost, RequestRefused, SlowReader
from jaxkv.serve.wire import Abort, Failed
from tests.serve.fake_engine import fake_engine


def run(test):
    return asyncio.run(asyncio.wait_for(test, 30))


async def ids_of(call):
    found = []
    while arrived := await call.arrivals():
        for tokens in arrived:
            found += tokens.ids
    return found


def test_a_call_brings_the_tokens_of_its_sample():
    async def test():
        async with fake_engine() as fake:
            call = fake.client.submit([5, 6, 7], SamplingParams())
            assert await ids_of(call) == [5, 6, 7]
            assert not call.is_open
            assert fake.client.num_open == 0

    run(test())


def test_what_is_not_read_comes_together():
    async def test():
        async with fake_engine(held=True) as fake:
            call = fake.client.submit([5, 6, 7], SamplingParams())
            while not fake.running:
                await asyncio.sleep(0)
            for _ in range(3):
                await fake.step()
            while call.is_open:
                await asyncio.sleep(0)
            assert [tokens.ids for tokens in await call.arrivals()] == [[5], [6], [7]]
            assert await call.arrivals() == []

    run(test())


def test_parameters_arrive_as_they_were():
    params = SamplingParams(temperature=0.5, n=2, logit_bias={3: -float("inf")}, stop_token_ids=[4])

    async def test():
        async with fake_engine() as fake:
            call = fake.client.submit([1], params, priority=-3, salt=b"key")
            await ids_of(call)
            [sent] = fake.calls.values()
            assert SamplingParams(**sent.sampling) == params
            assert (sent.priority, sent.salt) == (-3, b"key")

    run(test())


def test_an_aborted_call_ends_and_is_forgotten():
    async def test():
        async with fake_engine(held=True) as fake:
            call = fake.client.submit([5, 6], SamplingParams(n=2))
            while not fake.running:
                await asyncio.sleep(0)
            await fake.step()
            call.abort(0)
            call.abort()
            call.abort()
            assert await call.arrivals() == []
            assert fake.client.num_open == 0
            while fake.running:
                await asyncio.sleep(0)
            assert fake.aborted == [Abort(0, 0), Abort(0, None)]

    run(test())


def test_a_refused_call_raises_the_engine_s_message():
    async def test():
        async with fake_engine(lambda submit: "too long") as fake:
            call = fake.client.submit([5], SamplingParams())
            with pytest.raises(RequestRefused, match="too long"):
                await call.arrivals()
            assert fake.client.num_open == 0

    run(test())


def test_a_reader_that_is_far_behind_is_aborted(monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_UNREAD_TOKENS", 10)

    async def test():
        async with fake_engine() as fake:
            slow = fake.client.submit(range(50), SamplingParams(max_tokens=50))
            while slow.is_open:
                await asyncio.sleep(0)
            with pytest.raises(SlowReader):
                await slow.arrivals()
            while not fake.aborted:
                await asyncio.sleep(0)
            assert await ids_of(fake.client.submit([1, 2], SamplingParams())) == [1, 2]

    run(test())


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_engine_ends_all_calls_and_questions(told):
    async def test():
        async with fake_engine(held=True) as fake:
            calls = [fake.client.submit([5, 6], SamplingParams()) for _ in range(3)]
            if told:
                await fake.send(Failed("broken", 4))
            else:
                await fake.die()
            for call in calls:
                with pytest.raises(EngineLost):
                    await call.arrivals()
            assert fake.client.exit_code == (4 if told else 1)
            with pytest.raises(EngineLost):
                fake.client.submit([1], SamplingParams())
            with pytest.raises(EngineLost):
                await fake.client.stats()
            await fake.client.wait_lost()

    run(test())


def test_statistics_are_asked_for():
    async def test():
        async with fake_engine() as fake:
            fake.stats = {"running": 3}
            assert await fake.client.stats() == {"running": 3}

    run(test())
