"""Through the same programs every result is equal bit for bit, in every schedule and with all other requests.

One engine serves trace after trace, so that prefix hits, evictions and pages full of another's numbers pile up.
"""

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.engine.request_state import FINISHED
from tests.engine.engines import (
    OTHER_HOLDER,
    PAGE,
    ROWS,
    assert_equal,
    assert_idle,
    engine_for,
    fill_free,
    oracle,
    request_of,
)

STEM = [5, 9, 5, 1, 7, 7, 2, 30, 4, 4, 11, 60, 3, 8, 8, 8, 19, 2, 6, 33]
WISHES = (
    {"logprobs": 2},
    {"logprobs": 2, "temperature": 0.8, "top_p": 0.9},
    {"logprobs": 1, "temperature": 1.2, "min_p": 0.02, "min_tokens": 2},
    {"logprobs": 0, "repetition_penalty": 1.3, "logit_bias": {3: 1.0}},
)
REQUESTS = [
    request_of(
        [*STEM[:begin], at, *STEM[:extra]],
        seed=at,
        max_tokens=3 + at % 6,
        stop_ids=(7, 19 + at),
        **WISHES[at % len(WISHES)],
    )
    for at, (begin, extra) in enumerate(
        (begin, extra) for begin in (0, 7, 8, 16, 20) for extra in (0, 3, 9)
    )
]


@pytest.fixture(scope="module")
def truths():
    """Each request alone, without a prefix cache; those of each wish have the tokens of `jaxkv.generate`."""
    engine = engine_for(pinned_shapes=True, prefix_cache=False)
    made = []
    for request in REQUESTS:
        made += engine.add([request])
        engine.run(made[-1:])
    assert_equal(made[:ROWS], oracle(REQUESTS[:ROWS]))
    return made


@pytest.fixture(scope="module")
def together():
    """An engine for all traces, which in the end must have met what they are for."""
    # Without idle checks, which would count the pages that a trace takes away as leaked.
    yield engine_for(pinned_shapes=True, most_rebuilds=10**9, idle_checks=False)
    assert min(SEEN.values()) > 20, SEEN


SEEN = {"cached": 0, "preempted": 0, "aborted": 0}
TRACES = st.lists(
    st.tuples(
        st.integers(0, len(REQUESTS) - 1),
        st.integers(0, 3),  # Steps before the next one arrives.
        st.sampled_from([None, None, None, 0, 2, 5]),  # Steps before it is aborted.
        st.sampled_from([0, 0, 1]),  # Its priority does not change what it says.
    ),
    min_size=1,
    max_size=7,
)


def run_trace(engine, truths, trace, taken, losses, junk):
    """Serves one trace with some pages taken away, and the cache lost before some steps."""
    allocator, steps = engine.sequence_runner.allocator, count()
    allocator.open(OTHER_HOLDER)
    allocator.reserve(OTHER_HOLDER, taken * PAGE)
    if junk:
        fill_free(engine.sequence_runner)
    made, due = [], {}

    def step():
        now = next(steps)
        for sequence in due.pop(now, ()):
            engine.abort(sequence)
        if now in losses:
            engine.runner.owner.poison("injected")
        engine.step()

    for at, pause, abort, priority in trace:
        [sequence] = engine.add([replace(REQUESTS[at], priority=priority)])
        made.append((sequence, truths[at], abort is not None))
        begun = next(steps)
        if abort is not None:
            due.setdefault(begun + 1 + abort, []).append(sequence)
        for _ in range(pause):
            step()
    while any(sequence.status != FINISHED for sequence, _, _ in made):
        step()
    for sequence, truth, may_end_early in made:
        if sequence.reason == "abort" and may_end_early:
            wanted = truth.token_ids[: sequence.generated]
            assert sequence.token_ids == wanted
            assert sequence.logprobs == truth.logprobs[: sequence.generated]
        else:
            assert (sequence.token_ids, sequence.reason) == (truth.token_ids, truth.reason)
            assert sequence.logprobs == truth.logprobs
    assert_idle(engine)
    return [sequence for sequence, _, _ in made]


MOST = ROWS * 64 // PAGE - 6


def traces(examples):
    return lambda test: settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )(
        given(
            TRACES,
            st.sampled_from([0, MOST]),
            st.sets(st.integers(0, 20), max_size=1),
            st.booleans(),
        )(test)
    )


@traces(120)
@pytest.mark.slow
def test_a_trace_changes_no_bit_of_any_result(together, truths, trace, taken, losses, junk):
    """Hits, chunks, preemptions, aborts, neighbours, rows and lost caches change no bit of a log-probability."""
    check(together, truths, trace, taken, losses, junk)


@pytest.mark.slow
@traces(1000)
def test_a_thousand_traces_change_no_bit_of_any_result(
    together, truths, trace, taken, losses, junk
):
    check(together, truths, trace, taken, losses, junk)


def check(together, truths, trace, taken, losses, junk):
    for sequence in run_trace(together, truths, trace, taken, losses, junk):
        SEEN["cached"] += bool(sequence.cached)
        SEEN["preempted"] += sequence.preemptions > 0
        SEEN["aborted"] += sequence.reason == "abort"
