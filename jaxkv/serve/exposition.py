"""The reply of `/metrics`: a server's counts in Prometheus' text format.

Names, labels and meanings under `vllm:` are those of vLLM 0.20 and later, so that boards made for it work. Names under
`jaxkv:` are our own.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxkv.serve.metrics import Histogram, Recorder
from jaxkv.serve.stats_poll import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


def exposition(recorder: Recorder, snapshot: Snapshot, model_name: str) -> bytes:
    """Returns all metrics.

    Args:
        recorder: what the server has done.
        snapshot: the engine's statistics.
        model_name: the served model.
    """
    registry = CollectorRegistry()
    registry.register(_Metrics(recorder, snapshot, model_name))
    return generate_latest(registry)


class _Metrics(Collector):
    """All metrics of one moment."""

    def __init__(self, recorder: Recorder, snapshot: Snapshot, model_name: str) -> None:
        self._recorder = recorder
        self._snapshot = snapshot
        # The engines of replicas are numbered as vLLM does it; what the server counts itself has the first number.
        self._model: Labels = (("model_name", model_name),)
        self._labels: Labels = (*self._model, ("engine", "0"))

    def describe(self) -> list[Metric]:
        """Returns no names, because names are checked where several collectors share a registry."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields each metric."""
        yield from self._of_requests(self._recorder)
        yield from self._of_engines(self._snapshot.stats.get("replicas") or [self._snapshot.stats])

    def _of_engines(self, engines: Sequence[Mapping[str, Any] | None]) -> Iterator[Metric]:
        """Yields the metrics of one or several engines, each with its number; of a lost one that it is down."""
        found: dict[str, Metric] = {}
        first = self._labels
        for number, stats in enumerate(engines):
            self._labels = (*self._model, ("engine", str(number)))
            up = self._gauge("jaxkv:engine_up", "1 while the engine works.", stats is not None)
            made = [] if stats is None else [*self._of_the_engine(stats), *self._of_our_own(stats)]
            for metric in (up, *made):
                known = found.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        self._labels = first
        yield from found.values()

    def _of_the_engine(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        prefix = stats["prefix"] or {"tokens_reused": 0, "tokens_computed": 0}
        yield self._gauge("vllm:num_requests_running", "Requests that run.", stats["running"])
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats["waiting"])
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the fullest group's pages that requests hold, from 0 to 1; of states if there are no pages.",
            max((group["used"] / max(1, group["total"]) for group in _measured(stats)), default=0),
        )
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache.",
            prefix["tokens_reused"] + prefix["tokens_computed"],
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Prompt tokens that were found in the prefix cache.",
            prefix["tokens_reused"],
        )
        if stats["speculation"] is not None:
            yield from self._of_speculation(stats["speculation"])

    def _of_speculation(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        drafted, accepted = stats["drafted"], stats["accepted"]
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Rows of steps that verified drafts.", drafted[0]
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.", sum(drafted)
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", sum(accepted)
        )
        names = [name for name, _ in self._labels]
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their position behind a row's next token, from 0.",
            labels=[*names, "position"],
        )
        for position, count in enumerate(accepted):
            by_position.add_metric([*self._values(), str(position)], count)
        yield by_position
        yield self._counter(
            "jaxkv:draft_steps", "Steps for which drafts were asked.", stats["steps"]
        )
        yield self._counter(
            "jaxkv:draft_steps_overlapped",
            "Steps with drafts of the device, sent before the step before was read.",
            stats["overlapped"],
        )
        by_drafts = CounterMetricFamily(
            "jaxkv:draft_steps_by_drafts",
            "Steps that verified drafts, by the most drafts of a row.",
            labels=[*names, "drafts"],
        )
        for drafts, count in enumerate(stats["steps_by_drafts"], 1):
            by_drafts.add_metric([*self._values(), str(drafts)], count)
        yield by_drafts
        yield self._gauge(
            "jaxkv:drafts_paused",
            "1 while a token takes longer with drafts than without.",
            stats["is_paused"],
        )

    def _of_requests(self, done: Recorder) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", done.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", done.generated_tokens)
        yield self._counter(
            "vllm:num_preemptions", "Preemptions of requests that ended.", done.preemptions
        )
        names = [name for name, _ in self._labels]
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Samples that ended, by their finish reason.",
            labels=[*names, "finished_reason"],
        )
        for reason, count in done.finished.items():
            finished.add_metric([*self._values(), reason], count)
        yield finished
        for name, what, histogram in (
            (
                "time_to_first_token_seconds",
                "From arrival to first token.",
                done.first_token_seconds,
            ),
            ("inter_token_latency_seconds", "Between two tokens.", done.inter_token_seconds),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a request between its tokens.",
                done.token_seconds,
            ),
            ("e2e_request_latency_seconds", "From arrival to end.", done.request_seconds),
            ("request_queue_time_seconds", "From arrival to the first step.", done.queue_seconds),
            (
                "request_prefill_time_seconds",
                "From the first step to the first token.",
                done.prefill_seconds,
            ),
            ("request_decode_time_seconds", "From first token to end.", done.decode_seconds),
            ("request_inference_time_seconds", "From first step to end.", done.inference_seconds),
            ("request_prompt_tokens", "Tokens of a prompt.", done.prompt_lengths),
            ("request_generation_tokens", "Generated tokens of a sample.", done.output_lengths),
        ):
            yield self._histogram(f"vllm:{name}", what, histogram)

    def _of_our_own(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        yield self._gauge(
            "jaxkv:stats_age_seconds", "Age of the engine's statistics.", self._snapshot.age
        )
        yield from self._groups(stats)
        yield self._counter("jaxkv:steps", "Steps of the engine.", stats["steps"])
        yield self._counter(
            "jaxkv:device_wait_seconds",
            "Time that steps have waited for the device.",
            stats["wait_seconds"],
        )
        yield self._counter("jaxkv:recoveries", "Lost caches replaced.", stats["recoveries"])
        yield self._gauge("jaxkv:programs", "Compiled programs.", stats["programs"])
        yield self._gauge(
            "jaxkv:programs_pending",
            "Programs that a thread has still to compile.",
            stats["programs_pending"],
        )
        yield self._counter(
            "jaxkv:programs_compiled_late",
            "Programs compiled after the warm-up.",
            stats["compiled_late"],
        )
        yield self._counter(
            "jaxkv:compile_seconds",
            "Time of compilation, loads from the compilation cache included.",
            stats["compile_seconds"],
        )
        prefix = stats["prefix"]
        if prefix is not None:
            yield self._counter(
                "jaxkv:prefix_cache_evictions", "Cached pages evicted.", prefix["evictions"]
            )
            yield self._counter(
                "jaxkv:state_checkpoints", "State checkpoints made.", prefix["checkpoints"]
            )
        host = stats["host"]
        if host is not None:
            for name in ("limit_bytes", "used_bytes", "entries"):
                yield self._gauge(
                    f"jaxkv:host_{name}", f"{name.replace('_', ' ')} of the host tier.", host[name]
                )
            for name in ("written", "read", "evictions", "refused", "hits", "failures"):
                yield self._counter(
                    f"jaxkv:host_{name}", f"{name.replace('_', ' ')} of the host tier.", host[name]
                )

    def _groups(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        names = [name for name, _ in self._labels]
        units = GaugeMetricFamily(
            "jaxkv:cache_units",
            "Pages or states of a group of layers: free, used by requests, or kept by the prefix cache alone.",
            labels=[*names, "group", "unit", "state"],
        )
        size = GaugeMetricFamily(
            "jaxkv:cache_bytes", "Memory of a group's pool.", labels=[*names, "group"]
        )
        for group in stats["cache"]:
            for state in ("free", "used", "kept"):
                units.add_metric(
                    [*self._values(), group["name"], group["unit"], state], group[state]
                )
            size.add_metric([*self._values(), group["name"]], group["num_bytes"])
        yield units
        yield size

    def _values(self) -> list[str]:
        return [value for _, value in self._labels]

    def _gauge(self, name: str, what: str, value: float | int) -> Metric:
        metric = GaugeMetricFamily(name, what, labels=[name for name, _ in self._labels])
        metric.add_metric(self._values(), value)
        return metric

    def _counter(self, name: str, what: str, value: float | int) -> Metric:
        metric = CounterMetricFamily(name, what, labels=[name for name, _ in self._labels])
        metric.add_metric(self._values(), value)
        return metric

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(name, what, labels=[name for name, _ in self._labels])
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        below = list(accumulate(histogram.counts))
        metric.add_metric(self._values(), list(zip(bounds, below, strict=True)), histogram.total)
        return metric


def _measured(stats: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the groups that can be full: each running request has one state of a group of states anyhow."""
    groups = stats["cache"]
    return [group for group in groups if group["unit"] == "page"] or groups
