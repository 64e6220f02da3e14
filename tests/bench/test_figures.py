"""The metrics of a benchmark, computed from given times."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.bench.figures import Objectives, Timeline, figures_of

TWO = [
    Timeline(prompt_tokens=10, cached_tokens=4, arrived=1.0, tokens=[2.0, 2.5, 4.0]),
    Timeline(prompt_tokens=30, arrived=2.0, tokens=[5.0]),
]


def test_rates_are_over_the_time_from_the_first_arrival_to_the_last_token():
    figures = figures_of(TWO)
    assert figures.seconds == 4.0
    assert (figures.requests, figures.failed) == (2, 0)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (40, 4, 4)
    assert figures.requests_per_second == 0.5
    assert figures.output_tokens_per_second == 1.0
    assert figures.total_tokens_per_second == 11.0


def test_each_latency_is_of_what_its_name_says():
    figures = figures_of(TWO)
    assert figures.ttft_ms is not None
    assert figures.tpot_ms is not None
    assert figures.itl_ms is not None
    assert figures.e2e_ms is not None
    assert figures.ttft_ms.mean == pytest.approx(2000)
    assert figures.e2e_ms.mean == pytest.approx(3000)
    # Only the first has more than one token: 2 seconds between three of them.
    assert figures.tpot_ms.p50 == figures.tpot_ms.p99 == pytest.approx(1000)
    assert (figures.itl_ms.mean, figures.itl_ms.p50) == pytest.approx((1000, 1000))
    assert figures.itl_ms.p90 == pytest.approx(500 + 0.9 * 1000)


def test_single_tokens_have_no_time_between_them():
    figures = figures_of([Timeline(prompt_tokens=1, arrived=0.0, tokens=[1.0])])
    assert figures.tpot_ms is None
    assert figures.itl_ms is None
    assert "ITL" not in str(figures)


def test_what_failed_counts_as_failed_alone():
    bad = Timeline(prompt_tokens=99, arrived=0.5, tokens=[9.0], failed=True)
    silent = Timeline(prompt_tokens=99, arrived=1.5)
    figures = figures_of([*TWO, bad, silent])
    assert (figures.requests, figures.failed) == (2, 2)
    assert (figures.prompt_tokens, figures.output_tokens) == (40, 4)
    assert figures.seconds == 4.5


def test_a_run_without_a_token_says_so():
    with pytest.raises(ValueError, match="none of 1 requests"):
        figures_of([Timeline(prompt_tokens=1, arrived=0.0)])


def test_figures_are_json_and_text():
    figures = figures_of(TWO)
    assert json.loads(json.dumps(figures.as_dict(), allow_nan=False))["itl_ms"]["p50"] == 1000
    told = str(figures)
    assert "2 requests in 4.00 s, 0 failed" in told
    assert [line.split()[0] for line in told.splitlines()[-4:]] == ["TTFT", "TPOT", "ITL", "E2EL"]


@given(st.lists(st.lists(st.floats(0.001, 10), min_size=1, max_size=20), min_size=1, max_size=10))
def test_percentiles_are_those_of_numpy_over_all_requests(gaps):
    lines = [Timeline(prompt_tokens=1, arrived=0.0, tokens=list(np.cumsum(one))) for one in gaps]
    figures = figures_of(lines)
    assert figures.ttft_ms is not None
    first = [one[0] * 1e3 for one in gaps]
    assert figures.ttft_ms.p90 == pytest.approx(np.percentile(first, 90))
    between = [gap * 1e3 for one in gaps for gap in one[1:]]
    if between:
        assert figures.itl_ms is not None
        assert figures.itl_ms.p99 == pytest.approx(np.percentile(between, 99))
        assert figures.itl_ms.mean == pytest.approx(np.mean(between))
    assert figures.output_tokens == sum(map(len, gaps))


def test_failures_are_counted_by_message_and_shown():
    full = [Timeline(prompt_tokens=1, arrived=0.0, failed=True, error="429: full")] * 2
    figures = figures_of([*TWO, *full, Timeline(prompt_tokens=1, arrived=0.0)])
    assert figures.failures == {"429: full": 2, "no message": 1}
    assert str(figures).splitlines()[1:3] == ["2 failed: 429: full", "1 failed: no message"]
    with pytest.raises(ValueError, match=r"none of 2 requests ended with a token: 429: full \(2"):
        figures_of(full)


def test_of_many_messages_the_most_frequent_are_shown():
    failed = [Timeline(prompt_tokens=1, arrived=0.0, failed=True, error=str(n)) for n in range(20)]
    shown = str(figures_of([*TWO, *failed, failed[7]])).splitlines()
    assert shown[1] == "2 failed: 7"
    assert shown[7] == "14 failed with other messages"
    assert shown[8].endswith("output tokens")


def test_events_of_several_tokens_and_a_later_end_count():
    one = Timeline(prompt_tokens=1, arrived=1.0, tokens=[2.0, 3.0], generated=9, ended=4.0)
    figures = figures_of([one])
    assert (figures.output_tokens, figures.seconds) == (9, 3.0)
    assert figures.tpot_ms is not None
    assert figures.itl_ms is not None
    assert figures.e2e_ms is not None
    assert (figures.tpot_ms.mean, figures.itl_ms.mean, figures.e2e_ms.mean) == (250, 1000, 3000)


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (Objectives(ttft=1000.0), 1),
        (Objectives(ttft=3000.0), 2),
        # The second request has one token, and so meets every time per output token.
        (Objectives(tpot=999.0), 1),
        (Objectives(tpot=1000.0), 2),
        (Objectives(e2el=2999.0), 0),
        (Objectives(ttft=1000.0, tpot=1000.0, e2el=3000.0), 1),
    ],
)
def test_goodput_is_of_the_requests_that_meet_every_objective(objectives, met):
    assert figures_of(TWO, objectives).goodput_per_second == met / 4.0


def test_without_objectives_there_is_no_goodput():
    assert figures_of(TWO).goodput_per_second is None
    assert "objectives" not in str(figures_of(TWO))
