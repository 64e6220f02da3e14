"""Several engine processes behind one client: routing, statistics, the loss of one, and the loss of all."""

import asyncio
import contextlib
import os
import signal

import httpx
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.replicas import devices
from jaxkv.serve import exit_codes
from jaxkv.serve.engine_client import EngineLost, ReplicaLost
from jaxkv.serve.exposition import exposition
from jaxkv.serve.metrics import Recorder
from jaxkv.serve.replicas import ReplicaClient, ReplicaProcesses
from jaxkv.serve.server import EngineRefused
from jaxkv.serve.stats_poll import Snapshot
from jaxkv.serve.wire import Start
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, kill, run
from tests.serve.test_server import Lines, text_of

SHORT = SamplingParams(max_tokens=4)


@contextlib.asynccontextmanager
async def replicas(count=2, **options):
    """Yields fake engines, and the client of all of them, which is ready."""
    fakes = [FakeEngine(**options) for _ in range(count)]
    client = ReplicaClient([fake.client for fake in fakes])
    client.start()
    for fake in fakes:
        fake.client.start = lambda: None
        await fake.start()
    await client.ready()
    try:
        yield fakes, client
    finally:
        await client.close()
        for fake in fakes:
            await fake.close()


async def tokens_of(call):
    found = []
    while new := await call.arrivals():
        found += [token for each in new for token in each.ids]
    return found


def test_a_prompt_goes_where_its_prefix_is_and_others_go_elsewhere():
    async def test():
        async with replicas() as (fakes, client):
            prompts = [[1] * 200, [2] * 200, [1] * 200 + [5], [2] * 200 + [6]]
            for prompt in prompts:
                assert await tokens_of(client.submit(prompt, SHORT)) == prompt[:4]
            given = [[call.ids for call in fake.calls.values()] for fake in fakes]
            assert given == [[prompts[0], prompts[2]], [prompts[1], prompts[3]]]

    run(test)


def test_samples_of_a_prompt_stay_together_and_count_as_load():
    async def test():
        async with replicas(held=True) as (_, client):
            client.submit([1], SamplingParams(n=3, max_tokens=2))
            for number in range(3):
                client.submit([2 + number], SHORT)
            assert client.num_open == 6
            assert [one.num_open for one in client.clients] == [3, 3]
            assert client.facts.max_sequences == 16

    run(test)


def test_statistics_are_those_of_all_and_of_each():
    async def test():
        async with replicas() as (fakes, client):
            fakes[0].stats["steps"], fakes[1].stats["steps"] = 10, 32
            stats = await client.stats()
            assert stats["steps"] == 42
            assert [each["steps"] for each in stats["replicas"]] == [10, 32]
            text = exposition(Recorder(), Snapshot(stats, 0.0), "served").decode()
            for number, steps in enumerate((10, 32)):
                assert (
                    f'jaxkv:steps_total{{engine="{number}",model_name="served"}} {steps}.0' in text
                )
                assert f'jaxkv:engine_up{{engine="{number}",model_name="served"}} 1.0' in text
            assert text.count("# HELP jaxkv:steps_total") == 1
            await fakes[1].die()
            with pytest.raises(EngineLost):
                await tokens_of(client.clients[1].submit([1], SHORT))
            stats = await client.stats()
            assert stats["replicas"][1] is None
            assert stats["steps"] == 10
            text = exposition(Recorder(), Snapshot(stats, 0.0), "served").decode()
            assert 'jaxkv:engine_up{engine="1",model_name="served"} 0.0' in text

    run(test)


def test_a_lost_replica_is_named_its_calls_end_and_the_others_go_on(caplog):
    async def test():
        async with replicas(held=True) as (fakes, client):
            calls = [client.submit([number], SHORT) for number in range(2)]
            await asyncio.sleep(0.05)
            await fakes[0].die()
            with pytest.raises(ReplicaLost, match="replica 0 of 2: the engine process has ended"):
                await tokens_of(calls[0])
            await asyncio.sleep(0.01)
            assert client.failure is None
            assert client.facts.max_sequences == 8
            later = client.submit([0], SHORT)
            while not calls[1]._news.is_set() or fakes[1].running:
                await fakes[1].step()
                await asyncio.sleep(0.01)
            assert await tokens_of(calls[1]) == [1]
            assert await tokens_of(later) == [0]
            assert "replica 0 of 2 is lost" in caplog.text
            assert "1 of 2 go on" in caplog.text
            await fakes[1].die()
            await client.wait_lost()
            with pytest.raises(ReplicaLost, match="replica 1 of 2"):
                client.submit([1], SHORT)
            with pytest.raises(EngineLost):
                await client.stats()

    run(test)


class Serving(Running):
    """A server of several engine processes."""

    def __init__(self, what, count=2, program="tests.serve.quick_engine"):
        def processes(start, program):
            made = ReplicaProcesses(start, count, program)
            self.pids = [one._process.pid for one in made.processes]
            made._process = made.processes[0]._process
            return made

        super().__init__(Start(model=what), program, Lines, 60.0, None, processes=processes)

    @property
    def are_gone(self):
        return not any(os.path.exists(f"/proc/{pid}") for pid in self.pids)


def test_a_server_goes_on_without_a_replica_and_ends_with_the_last_one():
    async def test():
        running = Serving("serves")
        await running.ready.wait()
        assert await text_of(running, 3) == (200, "token\n" * 3 + "end\n")
        os.kill(running.pids[0], signal.SIGKILL)
        while len(running.client.live) == 2:
            await asyncio.sleep(0.01)
        assert await text_of(running, 3) == (200, "token\n" * 3 + "end\n")
        os.kill(running.pids[1], signal.SIGKILL)
        assert await running.ended == exit_codes.FAILED
        assert running.are_gone

    run(test)


def test_a_signal_ends_all_replicas():
    async def test():
        running = Serving("serves", 3)
        await running.ready.wait()
        kill()
        assert await running.ended == exit_codes.OK
        assert running.are_gone

    run(test)


def test_a_model_that_one_replica_refuses_is_refused_with_its_words():
    async def test():
        running = Serving("refuses")
        with pytest.raises(EngineRefused, match=r"replica . of 2: there is no such model"):
            await running.ended
        assert running.are_gone

    run(test)


def test_a_request_of_a_killed_replica_gets_an_error_that_names_it():
    async def test():
        running = Serving("is killed")
        await running.ready.wait()
        async with httpx.AsyncClient(timeout=30) as http:
            reply = await http.get(f"{running.url}/5")
        assert reply.text == "lost\n"
        assert len(running.client.live) == 1
        kill()
        assert await running.ended == exit_codes.OK
        assert running.are_gone

    run(test)


def test_too_few_gpus_are_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda environment: ["0"])
    with pytest.raises(ValueError, match="needs 2 GPUs, and 1 are visible here"):
        ReplicaProcesses(Start(), 2)
