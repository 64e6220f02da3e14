"""The records of pages are checked when no request is left; contradictions are raised with the ids."""

import random
from itertools import count

import pytest

from jaxkv.cache import integrity
from jaxkv.cache.integrity import IdleCheck
from jaxkv.errors import CorruptBooks
from tests.engine.engines import request_of
from tests.engine.simulated_engines import Setting, engine_of
from tests.engine.simulated_memory import put_caches_on_device

REQUEST, OTHER = request_of(range(1, 20), max_tokens=3), request_of([60, 2], max_tokens=20)


def lose_a_page(engine):
    engine.sequence_runner.allocator.pool("gqa").take(1)


def leave_a_sequence(engine):
    engine.sequence_runner.allocator.open(10**6)
    engine.sequence_runner.allocator.reserve(10**6, 1)


def forget_a_kept_page(engine):
    pool = engine.sequence_runner.allocator.pool("gqa")
    pool.release_kept(min(pool.kept))


CORRUPTIONS = {
    lose_a_page: r"group 'gqa': the counted and the actual references of these pages differ: \{\d+: \(1, 0\)\}",
    leave_a_sequence: r"sequences \[1000000\] hold pages or states and do not run",
    forget_a_kept_page: r"the index has the pages \[\d+\] without a reference",
}


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    put_caches_on_device(monkeypatch)


def serve(engine, *requests):
    engine.run([engine.add([request])[0] for request in requests])


def engine_for(**config):
    engine, _ = engine_of(random.Random(0), Setting("full", **config))
    return engine


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_an_idle_engine_raises_the_ids_of_books_that_contradict_each_other(corrupt, monkeypatch):
    monkeypatch.setattr(integrity, "_MOST_SHARE", 1e9)  # Every check is due.
    engine = engine_for()
    serve(engine, REQUEST)
    corrupt(engine)
    with pytest.raises(CorruptBooks, match=CORRUPTIONS[corrupt]):
        serve(engine, OTHER)


def test_books_are_not_checked_while_requests_are_left():
    engine = engine_for()
    [first], [second] = engine.add([REQUEST]), engine.add([OTHER])
    engine.run([first])
    leave_a_sequence(engine)
    engine.step()
    with pytest.raises(CorruptBooks):
        engine.run([second])


def test_idle_checks_can_be_turned_off():
    engine = engine_for(idle_checks=False)
    leave_a_sequence(engine)
    serve(engine, REQUEST)
    assert engine.sequence_runner.allocator.is_open(10**6)


def test_a_sequence_that_was_open_before_the_engine_was_made_is_no_leak():
    engine = engine_for()
    leave_a_sequence(engine)
    allocator = engine.sequence_runner.allocator
    assert IdleCheck(allocator, engine.prefix, count().__next__).run_if_due()
    allocator.release(10**6)


def test_checks_take_at_most_a_hundredth_of_the_time():
    allocator = engine_for().sequence_runner.allocator
    now, spent = 0.0, 0.0

    def clock():
        return now

    def check():
        nonlocal now, spent
        now, spent = now + 0.25, spent + 0.25

    allocator.check = check
    idle_check = IdleCheck(allocator, None, clock)
    for _ in range(10_000):
        now += 0.01
        idle_check.run_if_due()
    assert 0 < spent <= 0.25 + now / 100
