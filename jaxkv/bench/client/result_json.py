"""The JSON of a run under the field names of `vllm bench serve`, so that tools which read those files read ours."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jaxkv.bench.client.measure import Run
from jaxkv.bench.figures import Timeline

_BACKENDS = {"completions": "openai", "chat": "openai-chat"}
_PERCENTILES = (50, 90, 99)


def result_json(run: Run, *, version: str, date: datetime) -> dict[str, Any]:
    """Returns the fields of vLLM, and under "jaxkv" the version and all settings.

    The lists have an entry for each request that ended, in the order of their beginning; a failed one has zeros and its
    message in "errors". Times are in seconds unless a name ends in "_ms".

    Args:
        run: the measurement.
        version: version of jaxkv.
        date: when it was made.
    """
    figures, about = run.figures, run.about
    lines = sorted(run.timelines, key=lambda one: one.arrived)
    rate = about["request_rate"]
    return {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "backend": _BACKENDS[about["endpoint"]],
        "endpoint_type": _BACKENDS[about["endpoint"]],
        "model_id": about["model"],
        "num_prompts": run.asked,
        "request_rate": "inf" if rate is None else rate,
        "burstiness": about["burstiness"],
        "max_concurrency": about["max_concurrency"],
        "duration": figures.seconds,
        "completed": figures.requests,
        "failed": figures.failed,
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.requests_per_second,
        "request_goodput": figures.goodput_per_second,
        "output_throughput": figures.output_tokens_per_second,
        "total_token_throughput": figures.total_tokens_per_second,
        "max_output_tokens_per_s": _most_tokens_in_a_second(lines),
        "max_concurrent_requests": _most_at_once(lines),
        **_spreads(lines),
        "input_lens": [one.prompt_tokens for one in lines],
        "output_lens": [one.output_tokens if one.good else 0 for one in lines],
        "ttfts": [one.ttft if one.good else 0.0 for one in lines],
        "itls": [np.diff(one.tokens).tolist() if one.good else [] for one in lines],
        "start_times": [one.arrived for one in lines],
        "errors": [one.error for one in lines],
        "jaxkv": {
            "version": version,
            "partial": run.interrupted,
            "cached_tokens": figures.cached_tokens,
            "failures": figures.failures,
            "uncounted": run.uncounted,
            "late_ms": run.late_ms,
            "settings": about,
        },
    }


def _spreads(lines: Sequence[Timeline]) -> dict[str, float]:
    """Returns mean, standard deviation, median and percentiles of each latency, in milliseconds; of none, zeros."""
    good = [one for one in lines if one.good]
    latencies = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": np.concatenate([np.diff(one.tokens) for one in good]),
        "e2el": [one.e2e for one in good],
    }
    found = {}
    for name, seconds in latencies.items():
        ms = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
        found |= {
            f"mean_{name}_ms": float(ms.mean()),
            f"median_{name}_ms": float(np.median(ms)),
            f"std_{name}_ms": float(ms.std()),
        }
        for percent in _PERCENTILES:
            found[f"p{percent}_{name}_ms"] = float(np.percentile(ms, percent))
    return found


def _most_tokens_in_a_second(lines: Sequence[Timeline]) -> float:
    """Returns the output tokens of the busiest second; an answer's tokens are spread evenly over its events."""
    good = [one for one in lines if one.good]
    first = min(one.arrived for one in good)
    seconds = np.concatenate([np.asarray(one.tokens) - first for one in good]).astype(int)
    weights = [one.output_tokens / len(one.tokens) for one in good for _ in one.tokens]
    return float(np.bincount(seconds, weights).max())


def _most_at_once(lines: Sequence[Timeline]) -> int:
    """Returns the largest number of requests that were under way at one time."""
    # An end sorts before a beginning at the same time.
    changes = sorted(
        (time, change)
        for one in lines
        if one.good
        for time, change in ((one.arrived, 1), (one.end, -1))
    )
    return int(np.cumsum([change for _, change in changes]).max())
