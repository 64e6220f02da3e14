"""The HTTP process's end of the socket, against a fake engine."""

import asyncio
import socket

import pytest
import uvloop

from jaxkv import SamplingParams
from jaxkv.serve import engine_client
from jaxkv.serve.engine_client import EngineClient, EngineLost, RequestRefused, SlowReader
from jaxkv.serve.wire import (
    Abort,
    Alive,
    Failed,
    StepDone,
    Submit,
    Tokens,
    frame,
    frames_to_engine,
)
from tests.serve.fake_engine import fake_engine

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run(test, loop=None):
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(test, 30))


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


def test_readers_that_take_long_get_several_steps_at_once_but_first_tokens_now(
    monkeypatch,
):
    class Clock:
        now = 0.0

        def thread_time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(engine_client, "time", clock)

    async def test():
        async with fake_engine(held=True) as fake:
            client, loop = fake.client, asyncio.get_running_loop()
            steps, pauses, read = [], [], []
            client.on_step = steps.append
            monkeypatch.setattr(loop, "call_later", lambda *timer: pauses.append(timer))

            async def read_slowly(call):
                while arrived := await call.arrivals():
                    read.append([tokens.ids[0] for tokens in arrived])
                    clock.now += 3.0

            async def step(count=1):
                wanted = len(steps) + count
                for _ in range(count):
                    await fake.step()
                while len(steps) < wanted:
                    await asyncio.sleep(0)
                for _ in range(5):
                    await asyncio.sleep(0)

            reading = asyncio.create_task(
                read_slowly(client.submit(range(10, 17), SamplingParams()))
            )
            while not fake.running:
                await asyncio.sleep(0)
            await step()
            assert (read, pauses) == ([[10]], [])
            await step()
            assert read == [[10], [11]]
            await step(3)
            assert read == [[10], [11]]
            [(seconds, end)] = pauses
            assert seconds == 3.0
            other = client.submit([7, 8], SamplingParams())
            while len(fake.running) < 2:
                await asyncio.sleep(0)
            await step()
            assert [tokens.ids for tokens in await other.arrivals()] == [[7]]
            end()
            await step()
            assert read == [[10], [11], [12, 13, 14, 15]]
            pauses[1][1]()
            await reading
            assert [tokens.ids for tokens in await other.arrivals()] == [[8]]

    asyncio.run(test())


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
            assert fake.client.last_words == ("broken" if told else "")
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


@LOOPS
def test_what_the_engine_does_not_take_at_once_is_sent_later(loop):
    prompts = [[each] * 50_000 for each in range(8)]

    async def test():
        ours, theirs = socket.socketpair()
        client, found, frames = EngineClient(ours), [], frames_to_engine()
        client.start()
        for prompt in prompts:
            client.submit(prompt, SamplingParams())
        theirs.setblocking(False)
        while len(found) < len(prompts):
            data = await asyncio.get_running_loop().sock_recv(theirs, 2**16)
            found += frames.feed(data)
        assert [submit.ids for submit in found if isinstance(submit, Submit)] == prompts
        await client.close()
        theirs.close()

    run(test(), loop)


@LOOPS
def test_a_closed_client_waits_for_its_socket_no_more(loop):
    async def test():
        ours, theirs = socket.socketpair()
        client = EngineClient(ours)
        client.start()
        for _ in range(8):
            client.submit([1] * 50_000, SamplingParams())
        number = ours.fileno()
        await client.close()
        running = asyncio.get_running_loop()
        assert not running.remove_reader(number)
        assert not running.remove_writer(number)
        theirs.close()

    run(test(), loop)


def test_an_engine_that_never_stops_to_write_leaves_others_their_turn(monkeypatch):
    monkeypatch.setattr(engine_client, "_READ_BYTES", 100)

    async def test():
        ours, theirs = socket.socketpair()
        client, seen = EngineClient(ours), []
        client.on_step = seen.append
        client.start()
        theirs.sendall(frame(StepDone([Tokens(0, 0, [1])])) * 100)
        turns = 0
        while len(seen) < 100:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10
        await client.close()
        theirs.close()

    run(test())


def test_a_message_that_cannot_be_handled_ends_all_calls():
    async def test():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))

        def fail(message):
            raise KeyError("a mistake of ours")

        async with fake_engine(held=True) as fake:
            call = fake.client.submit([5, 6], SamplingParams())
            fake.client.on_step = fail
            while not fake.running:
                await asyncio.sleep(0)
            await fake.step()
            assert [tokens.ids for tokens in await call.arrivals()] == [[5]]
            with pytest.raises(EngineLost):
                await call.arrivals()
        [error] = errors
        assert isinstance(error["exception"], KeyError)

    run(test())


def test_frames_of_any_kind_are_signs_of_life():
    async def test():
        async with fake_engine() as fake:
            fake.client.last_sign -= 100
            assert fake.client.silent_seconds > 99
            await fake.send(Alive("step"))
            while fake.client.silent_seconds > 50:
                await asyncio.sleep(0)
            assert fake.client.alive == Alive("step")

    run(test())


def test_calls_that_end_in_any_way_are_forgotten():
    async def test():
        async with fake_engine(lambda submit: "no" if submit.ids == [9] else submit.ids) as fake:
            for number in range(200):
                ids = [9] if number % 3 == 0 else [number] * 4
                call = fake.client.submit(ids, SamplingParams(n=1 + number % 2))
                if number % 5 == 0:
                    call.abort()
                elif ids == [9]:
                    with pytest.raises(RequestRefused):
                        await call.arrivals()
                else:
                    await ids_of(call)
            while fake.client.num_open:
                await asyncio.sleep(0)
            assert not fake.client._queries

    run(test())


def test_the_last_words_of_an_engine_that_has_ended_are_read_before_a_failed_write():
    async def test():
        ours, theirs = socket.socketpair()
        client = EngineClient(ours)
        client.start()
        theirs.sendall(frame(Failed("no memory", 3)))
        theirs.close()
        call = client.submit([1], SamplingParams())
        with pytest.raises(EngineLost):
            await call.arrivals()
        assert (client.last_words, client.exit_code) == ("no memory", 3)
        await client.close()

    run(test())
