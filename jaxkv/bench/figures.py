"""Serving metrics (throughput, TTFT, TPOT, ITL, goodput) computed from the times of tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxkv.wording import MOST_LISTED, listed

NO_MESSAGE = "no message"
"""Counts failed requests that have none."""


@dataclass(kw_only=True)
class Timeline:
    """The times of one request, in seconds of one clock.

    Attributes:
        prompt_tokens: tokens of the prompt.
        arrived: time from which latencies count: for an engine, when the request was due, which may be before it was
            added; for a server, when it was sent.
        queued: begin and end of its time in a queue, if known: in the client before `arrived`, or in the engine.
        cached_tokens: prompt tokens that were found in the prefix cache.
        tokens: time of each output token, or of each event of a server, which may bring several tokens.
        generated: number of output tokens, if events may bring several; `None`: one for each of `tokens`.
        ended: time of the end, if it may be after the last of `tokens`; `None`: the last of `tokens`.
        failed: whether the request ended in an error.
        error: message of the error.
    """

    prompt_tokens: int
    arrived: float
    queued: tuple[float, float] | None = None
    cached_tokens: int = 0
    tokens: list[float] = field(default_factory=list)
    generated: int | None = None
    ended: float | None = None
    failed: bool = False
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended without an error, with a token."""
        return bool(self.tokens) and not self.failed

    @property
    def output_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) if self.generated is None else self.generated

    @property
    def end(self) -> float:
        """Time of its end; of the arrival if nothing came."""
        if self.ended is not None:
            return self.ended
        return self.tokens[-1] if self.tokens else self.arrived

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token; there must be one."""
        return self.tokens[0] - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean seconds between two tokens; `None` for fewer than two tokens."""
        pairs = self.output_tokens - 1
        return (self.end - self.tokens[0]) / pairs if pairs > 0 else None

    @property
    def e2e(self) -> float:
        """Seconds from the arrival to the end."""
        return self.end - self.arrived


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Service level objectives: the longest latencies, in milliseconds, of a request that counts for goodput.

    Attributes:
        ttft, tpot, e2el: most of each; `None` for any. Requests of one token meet every TPOT.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def met_by(self, timeline: Timeline) -> bool:
        """Whether a request that did not fail meets all of them."""
        taken = ((timeline.ttft, self.ttft), (timeline.tpot, self.tpot), (timeline.e2e, self.e2el))
        return all(
            seconds is None or most is None or seconds * 1e3 <= most for seconds, most in taken
        )


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of durations, in milliseconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The metrics of one benchmark run.

    Attributes:
        requests, failed: number of requests that ended with all their tokens, and with an error.
        failures: message of an error -> how many requests failed with it.
        seconds: time from the first arrival to the end of the last request that did not fail.
        prompt_tokens, cached_tokens, output_tokens: sums over all requests that did not fail.
        requests_per_second, output_tokens_per_second, total_tokens_per_second: over `seconds`; the total counts
            prompts, cached or not.
        goodput_per_second: requests per second that met the objectives; `None` without objectives.
        ttft_ms: time to first token: from a request's arrival to its first token.
        tpot_ms: time per output token: a request's mean time between tokens; over requests of two tokens or more.
        itl_ms: inter-token latency: the time between two tokens; over all pairs of successive tokens, or of
            successive events of a server.
        e2e_ms: end-to-end latency: from a request's arrival to its end.
    """

    requests: int
    failed: int
    failures: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_per_second: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as a dictionary for JSON, with spreads as dictionaries."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.requests} requests in {self.seconds:.2f} s, {self.failed} failed",
            f"{self.prompt_tokens:,} prompt tokens, {self.cached_tokens:,} of them cached; "
            f"{self.output_tokens:,} output tokens",
            f"{self.requests_per_second:.2f} requests/s, {self.output_tokens_per_second:,.1f} output tokens/s, "
            f"{self.total_tokens_per_second:,.1f} total tokens/s",
        ]
        lines[1:1] = self._failure_lines()
        if self.goodput_per_second is not None:
            lines.append(f"{self.goodput_per_second:.2f} requests/s met the objectives")
        lines += [
            f"{'ms':12s} {'mean':>10s} {'p50':>10s} {'p90':>10s} {'p99':>10s}",
        ]
        rows = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "ITL": self.itl_ms, "E2EL": self.e2e_ms}
        for name, spread in rows.items():
            if spread is not None:
                numbers = (spread.mean, spread.p50, spread.p90, spread.p99)
                lines.append(f"{name:12s} " + " ".join(f"{n:10.2f}" for n in numbers))
        return "\n".join(lines)

    def _failure_lines(self) -> list[str]:
        failures = list(self.failures.items())
        lines = [f"{count} failed: {message}" for message, count in failures[:MOST_LISTED]]
        rest = sum(count for _, count in failures[MOST_LISTED:])
        return [*lines, f"{rest} failed with other messages"] if rest else lines


def figures_of(timelines: Sequence[Timeline], objectives: Objectives | None = None) -> Figures:
    """Returns the figures of a run; failed requests count in `failed` and `failures` alone.

    Args:
        timelines: the requests that ended.
        objectives: what a request has to meet to count for goodput.

    Raises:
        ValueError: all requests failed.
    """
    good = [one for one in timelines if one.good]
    failures = Counter(one.error or NO_MESSAGE for one in timelines if not one.good)
    if not good:
        told = listed([f"{message} ({count} times)" for message, count in failures.most_common()])
        raise ValueError(
            f"no figures can be computed: none of {len(timelines)} requests ended with a token: {told}"
        )
    seconds = max(one.end for one in good) - min(one.arrived for one in timelines)
    prompt = sum(one.prompt_tokens for one in good)
    output = sum(one.output_tokens for one in good)
    gaps = [np.diff(one.tokens) for one in good]
    return Figures(
        requests=len(good),
        failed=len(timelines) - len(good),
        failures=dict(failures.most_common()),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=output,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        goodput_per_second=objectives and sum(map(objectives.met_by, good)) / seconds,
        ttft_ms=_spread([one.ttft for one in good]),
        tpot_ms=_spread([one.tpot for one in good if one.tpot is not None]),
        itl_ms=_spread(np.concatenate(gaps)),
        e2e_ms=_spread([one.e2e for one in good]),
    )


def _spread(seconds: Sequence[float] | np.ndarray) -> Spread | None:
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = (float(number) for number in np.percentile(ms, (50, 90, 99)))
    return Spread(float(ms.mean()), p50, p90, p99)
