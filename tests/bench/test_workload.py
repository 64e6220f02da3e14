"""Workloads are drawn from their seed, inside their bounds."""

import inspect

import numpy as np
import pytest

from jaxkv.bench.workload import Workload
from jaxkv.bench.workload import arrivals as checked_arrivals

arrivals = inspect.unwrap(checked_arrivals)


def test_lengths_lie_inside_their_bounds_and_reach_them():
    requests = Workload(requests=300, prompt_tokens=(3, 6), output_tokens=(2, 4)).draw(50)
    assert {len(request.prompt) for request in requests} == {3, 4, 5, 6}
    assert {request.params.max_tokens for request in requests} == {2, 3, 4}
    assert all(0 <= token < 50 for request in requests for token in request.prompt)
    assert all(request.params.ignore_eos and not request.stop_ids for request in requests)


def test_the_same_seed_asks_the_same():
    workload = Workload(requests=5, prompt_tokens=(3, 6), output_tokens=(2, 4))
    assert workload.draw(50) == workload.draw(50)
    other = Workload(requests=5, prompt_tokens=(3, 6), output_tokens=(2, 4), seed=1)
    assert workload.draw(50) != other.draw(50)


def test_the_default_is_the_published_benchmark_of_nano_vllm():
    workload = Workload()
    assert (workload.requests, workload.longest) == (256, 2048)
    assert workload.prompt_tokens == workload.output_tokens == (100, 1024)


def test_prompts_of_shared_prefix_begin_alike_and_then_differ():
    sizes = {"requests": 20, "prompt_tokens": (12, 20), "output_tokens": (1, 1)}
    requests = Workload(data="shared-prefix", prefix_tokens=11, **sizes).draw(1000)
    assert len({request.prompt[:11] for request in requests}) == 1
    assert len({request.prompt[11:] for request in requests}) == 20
    alone = Workload(prefix_tokens=11, **sizes).draw(1000)
    assert len({request.prompt[:11] for request in alone}) == 20


def test_the_example_is_as_long_as_any():
    example = Workload(prompt_tokens=(3, 6), output_tokens=(2, 4)).example()
    assert (len(example.prompt), example.params.max_tokens) == (6, 4)


BOTH = ("prompt_tokens", "output_tokens")


@pytest.mark.parametrize(
    ("sizes", "limit", "names", "wanted"),
    [
        ({}, 2048, BOTH, ((100, 1024), (100, 1024))),
        ({}, 1024, BOTH, ((100, 512), (100, 512))),
        ({}, 130, BOTH, ((65, 65), (65, 65))),
        ({"prompt_tokens": (900, 1000)}, 1024, BOTH[1:], ((900, 1000), (24, 24))),
        ({"output_tokens": (9, 10)}, 1024, BOTH[:1], ((100, 1014), (9, 10))),
        ({}, 1024, (), ((100, 1024), (100, 1024))),
        ({"prompt_tokens": (1, 5000)}, 1024, BOTH[1:], ((1, 5000), (1, 1))),
    ],
)
def test_lengths_are_clipped_to_fit_together_where_they_may_be(sizes, limit, names, wanted):
    clipped = Workload(**sizes).clipped(limit, *names)
    assert (clipped.prompt_tokens, clipped.output_tokens) == wanted


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": "chat"}, "data must be one of random, shared-prefix, sharegpt"),
        ({"requests": 0}, "number of requests"),
        ({"prompt_tokens": (0, 5)}, "the least of prompt_tokens"),
        ({"output_tokens": (5, 4)}, "the most of output_tokens .* got 4; the least is 5"),
        (
            {"data": "shared-prefix", "prompt_tokens": (8, 9), "prefix_tokens": 8},
            "prefix_tokens .* got 8; the shortest prompt has 8 tokens",
        ),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        Workload(**wrong).example()


def test_arrivals_are_a_poisson_process():
    due = np.asarray(arrivals(20001, 4.0, 0))
    assert due[0] == 0
    gaps = np.diff(due)
    assert (gaps > 0).all()
    # The mean of 20000 gaps lies within 4 standard errors, and they vary as much as they last.
    assert gaps.mean() == pytest.approx(0.25, rel=4 / np.sqrt(20000))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert (np.asarray(arrivals(20001, 4.0, 0)) == due).all()


def test_without_a_rate_all_come_at_once():
    assert arrivals(3, None, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="request rate must be above 0"):
        arrivals(3, rate, 0)


def test_lengths_of_sharegpt_have_the_means_that_vllm_printed():
    workload = Workload(
        data="sharegpt", requests=20000, prompt_tokens=(4, 1024), output_tokens=(4, 1024)
    )
    prompts, outputs = np.transpose(workload.draw_lengths(np.random.default_rng(0)))
    # 229.7 and 203.1 tokens, within 3%; the median of such a skewed distribution is far below its mean.
    assert prompts.mean() == pytest.approx(229.7, rel=0.03)
    assert outputs.mean() == pytest.approx(203.1, rel=0.03)
    assert np.median(prompts) < 150
    assert prompts.min() >= 4
    assert prompts.max() <= 1024


@pytest.mark.parametrize("bounds", [(7, 7), (2**24, 2**24), (1, 2**24)])
def test_any_bounds_hold_for_lengths_of_sharegpt(bounds):
    workload = Workload(data="sharegpt", requests=50, prompt_tokens=bounds, output_tokens=bounds)
    for lengths in workload.draw_lengths(np.random.default_rng(0)):
        assert all(bounds[0] <= length <= bounds[1] for length in lengths)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_how_much_gaps_vary_and_not_their_mean(burstiness):
    gaps = np.diff(arrivals(20001, 4.0, 0, burstiness))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, float("inf"), float("nan")])
def test_a_burstiness_that_is_none_is_refused(burstiness):
    with pytest.raises(ValueError, match="burstiness must be above 0"):
        arrivals(3, 1.0, 0, burstiness)
