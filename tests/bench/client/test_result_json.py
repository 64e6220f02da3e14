"""The file of results has the fields of vLLM's benchmark."""

import json
from datetime import datetime

import pytest

from jaxkv.bench.client.result_json import result_json
from jaxkv.bench.figures import Objectives
from jaxkv.bench.workload import Workload
from tests.bench.client.scripted_server import ScriptedServer, answer, measure

# What vLLM 0.33 writes for a run of an OpenAI endpoint, but for texts and what needs its own tokenizer.
OF_VLLM = {
    "date",
    "backend",
    "endpoint_type",
    "model_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "start_times",
    "errors",
    *(
        f"{part}_{name}_ms"
        for part in ("mean", "median", "std", "p50", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


@pytest.fixture
def told(tmp_path):
    scripts = [answer(0.2, 0.1, 1.9), 429, answer(0.4, output=3)]
    told = measure(
        tmp_path,
        ScriptedServer(scripts),
        workload=Workload(requests=3, prompt_tokens=(3, 6), output_tokens=(2, 4)),
        objectives=Objectives(ttft=300.0),
    )
    [run] = told.runs
    found = result_json(run, version="1.2", date=datetime(2026, 11, 23, 9, 5, 7))
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_names_are_those_of_vllm_and_one_of_our_own(told):
    assert set(told) == OF_VLLM | {"jaxkv"}
    assert told["date"] == "20261123-090507"
    assert (told["backend"], told["model_id"], told["request_rate"]) == ("openai", "m", "inf")
    assert told["jaxkv"]["version"] == "1.2"
    assert told["jaxkv"]["partial"] is False
    assert told["jaxkv"]["failures"] == {"429 Too Many Requests": 1}
    assert told["jaxkv"]["settings"]["workload"]["requests"] == 3


def test_sums_and_latencies_are_those_of_the_run(told):
    assert (told["completed"], told["failed"], told["num_prompts"]) == (2, 1, 3)
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (14, 6)
    assert told["duration"] == pytest.approx(2.2)
    assert told["request_goodput"] == pytest.approx(1 / 2.2)
    assert told["output_throughput"] == pytest.approx(6 / 2.2)
    assert told["median_ttft_ms"] == told["p50_ttft_ms"] == pytest.approx(300)
    assert told["std_ttft_ms"] == pytest.approx(100)
    assert told["mean_e2el_ms"] == pytest.approx(1300)
    # Three tokens in one event, at once, and pairs 1000 ms apart on average.
    assert told["mean_tpot_ms"] == pytest.approx(500)
    # In the first second come five of six tokens; the last comes in the third.
    assert told["max_output_tokens_per_s"] == pytest.approx(5)
    assert told["max_concurrent_requests"] == 2


def test_requests_that_follow_one_another_are_one_at_a_time(tmp_path):
    server = ScriptedServer([answer(0.2), answer(0.2), answer(0.2)])
    workload = Workload(requests=3, prompt_tokens=(3, 6), output_tokens=(2, 4))
    [run] = measure(tmp_path, server, workload=workload, max_concurrency=1).runs
    found = result_json(run, version="1.2", date=datetime(2026, 11, 23))
    assert (found["max_concurrent_requests"], found["max_concurrency"]) == (1, 1)


def test_lists_have_an_entry_for_each_request(told):
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
    assert {len(told[name]) for name in lists} == {3}
    assert sorted(told["ttfts"]) == pytest.approx([0, 0.2, 0.4])
    assert sorted(told["output_lens"]) == [0, 3, 3]
    assert sorted(map(len, told["itls"])) == [0, 0, 2]
    assert sorted(told["errors"]) == ["", "", "429 Too Many Requests"]
