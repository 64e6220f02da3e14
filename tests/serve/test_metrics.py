"""The recorder counts what calls got, whatever ends them."""

import asyncio

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.engine_client import EngineLost, RequestRefused
from jaxkv.serve.generation import generate
from jaxkv.serve.metrics import SECONDS_OF_RATES, Histogram, Recorder, TokenRate
from tests.serve.fake_engine import fake_engine


def test_a_histogram_counts_each_value_at_its_bound():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    assert (histogram.counts, histogram.total) == ([2, 4, 1], 11.5)


def test_a_rate_remembers_the_last_seconds_and_forgets_older_ones():
    rate = TokenRate(10.2)
    rate.add(3, 10.4)
    assert rate.seconds(10.9) == []
    rate.add(4, 11.9)
    rate.add(1, 11.95)
    assert rate.seconds(13.0) == [3, 5, 0]
    rate.add(2, 12.9)  # Times of calls may be read a moment before another reader's.
    assert rate.seconds(14.0)[-1] == 2
    assert rate.seconds(14.0 + SECONDS_OF_RATES) == [0] * SECONDS_OF_RATES
    assert rate.seconds(1e9) == [0] * SECONDS_OF_RATES


def recorded(work, **options):
    """Returns the recorder after some work with a fake engine."""
    recorder = Recorder()

    async def run():
        async with fake_engine(**options) as engine:

            def begin(ids, **params):
                return generate(
                    engine.client, None, ids, SamplingParams(**params), watcher=recorder
                )

            await work(engine, begin)

    asyncio.run(run())
    return recorder


async def read(generation):
    while await generation.deltas():
        pass


def sums(recorder):
    """Returns the number of values of each histogram."""
    return {
        name: sum(value.counts)
        for name, value in vars(recorder).items()
        if isinstance(value, Histogram)
    }


def test_a_finished_call_is_in_every_histogram():
    async def work(engine, begin):
        call = begin([7, 8, 9], n=2, max_tokens=3)
        await read(call)
        call.abort()

    recorder = recorded(work)
    assert (recorder.prompt_tokens, recorder.generated_tokens) == (3, 6)
    assert recorder.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    counts = sums(recorder)
    assert counts.pop("output_lengths") == 2
    # Two tokens of each sample come after another one, if the reader is not a step behind.
    assert counts.pop("inter_token_seconds") <= 4
    assert set(counts.values()) == {1}


def test_aborted_and_lost_calls_are_counted_once_without_times_of_tokens_that_never_came():
    async def work(engine, begin):
        first = begin([1, 2], max_tokens=9)
        first.abort()
        first.abort()
        lost = begin([1], n=3)
        await engine.die()
        for _ in range(2):
            with pytest.raises(EngineLost):
                await read(lost)
        lost.abort()

    recorder = recorded(work, held=True)
    assert recorder.finished == {"stop": 0, "length": 0, "abort": 1, "error": 3}
    assert (recorder.prompt_tokens, recorder.generated_tokens) == (0, 0)
    assert set(sums(recorder).values()) == {0}


def test_a_refused_call_is_an_error():
    async def work(engine, begin):
        with pytest.raises(RequestRefused):
            await read(begin([1]))

    assert recorded(work, script=lambda submit: "too long").finished["error"] == 1


def test_tokens_that_come_together_share_the_time_between_them():
    recorder = Recorder()
    recorder.tokens(2, None, 0.1)
    recorder.tokens(4, 0.2, 0.3)
    histogram = recorder.inter_token_seconds
    assert sum(histogram.counts) == 4
    assert histogram.counts[histogram.bounds.index(0.05)] == 4
    assert histogram.total == pytest.approx(0.2)
