"""The engine is asked once, however many look, and a silent one does not hold anybody up."""

import asyncio

import pytest

from jaxkv.serve import stats_poll
from jaxkv.serve.engine_client import EngineLost
from jaxkv.serve.stats_poll import EngineSilent, StatsPoll
from tests.serve.fake_engine import fake_engine


def with_poll(work, *, pages=False):
    async def run():
        async with fake_engine() as engine:
            await work(engine, StatsPoll(engine.client, pages=pages))

    asyncio.run(asyncio.wait_for(run(), 30))


def test_many_readers_ask_the_engine_once():
    async def work(engine, poll):
        snapshots = await asyncio.gather(*(poll.get() for _ in range(50)))
        snapshots.append(await poll.get())
        assert len({id(one.stats) for one in snapshots}) == 1
        assert [each.pages for each in engine.questions] == [False]

    with_poll(work)


def test_old_statistics_are_asked_for_again(monkeypatch):
    monkeypatch.setattr(stats_poll, "GOOD_SECONDS", 0.0)

    async def work(engine, poll):
        assert (await poll.get()).stats["running"] == 0
        engine.stats["running"] = 5
        assert (await poll.get()).stats["running"] == 5

    with_poll(work)


def test_a_slow_picture_is_good_for_a_hundred_times_its_cost(monkeypatch):
    monkeypatch.setattr(stats_poll, "GOOD_SECONDS", 0.0)

    async def work(engine, poll):
        engine.picture = {**engine.picture, "picture_seconds": 9.0}
        await poll.get()
        await poll.get()
        assert len(engine.questions) == 1
        assert (await poll.get()).stats["maps"]

    with_poll(work, pages=True)


def test_a_silent_engine_gives_its_last_statistics(monkeypatch):
    monkeypatch.setattr(stats_poll, "GOOD_SECONDS", 0.0)
    monkeypatch.setattr(stats_poll, "WAIT_SECONDS", 0.01)

    async def work(engine, poll):
        engine.answers_stats = False
        with pytest.raises(EngineSilent):
            await poll.get()
        engine.answers_stats = True
        fresh = StatsPoll(engine.client, pages=False)
        before = await fresh.get()
        engine.answers_stats = False
        after = await fresh.get()
        assert after.stats is before.stats
        assert after.age > 0

    with_poll(work)


def test_a_reader_that_gives_up_leaves_the_question_to_the_others():
    async def work(engine, poll):
        first = asyncio.create_task(poll.get())
        await asyncio.sleep(0)
        second = asyncio.create_task(poll.get())
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).stats["running"] == 0
        assert len(engine.questions) == 1

    with_poll(work)


def test_a_lost_engine_is_an_error():
    async def work(engine, poll):
        engine.answers_stats = False
        asked = asyncio.create_task(poll.get())
        await asyncio.sleep(0)
        await engine.die()
        with pytest.raises(EngineLost):
            await asked
        with pytest.raises(EngineLost):
            await poll.get()

    with_poll(work)
