"""Serving metrics (throughput, TTFT, TPOT, ITL) computed from the times of tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(kw_only=True)
class Timeline:
    """The times of one request, in seconds of one clock.

    Attributes:
        prompt_tokens: tokens of the prompt.
        arrived: time at which the request was due, which may be before it was added to the engine.
        cached_tokens: prompt tokens that were found in the prefix cache.
        tokens: time of each output token.
        failed: whether the request ended in an error.
    """

    prompt_tokens: int
    arrived: float
    cached_tokens: int = 0
    tokens: list[float] = field(default_factory=list)
    failed: bool = False


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
        seconds: time from the first arrival to the last token.
        prompt_tokens, cached_tokens, output_tokens: sums over all requests that did not fail.
        requests_per_second, output_tokens_per_second, total_tokens_per_second: over `seconds`; the total counts
            prompts, cached or not.
        ttft_ms: time to first token: from a request's arrival to its first token.
        tpot_ms: time per output token: a request's mean time between tokens; over requests of two tokens or more.
        itl_ms: inter-token latency: the time between two tokens; over all pairs of successive tokens.
        e2e_ms: end-to-end latency: from a request's arrival to its last token.
    """

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
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
            f"{'ms':12s} {'mean':>10s} {'p50':>10s} {'p90':>10s} {'p99':>10s}",
        ]
        for name in ("ttft", "tpot", "itl", "e2e"):
            spread: Spread | None = getattr(self, f"{name}_ms")
            if spread is not None:
                numbers = (spread.mean, spread.p50, spread.p90, spread.p99)
                lines.append(f"{name.upper():12s} " + " ".join(f"{n:10.2f}" for n in numbers))
        return "\n".join(lines)


def figures_of(timelines: Sequence[Timeline]) -> Figures:
    """Returns the figures of a run; failed requests count in `failed` alone.

    Raises:
        ValueError: all requests failed.
    """
    good = [one for one in timelines if one.tokens and not one.failed]
    if not good:
        raise ValueError(
            f"no figures can be computed: none of {len(timelines)} requests ended with a token"
        )
    seconds = max(one.tokens[-1] for one in good) - min(one.arrived for one in timelines)
    prompt = sum(one.prompt_tokens for one in good)
    output = sum(len(one.tokens) for one in good)
    several = [one for one in good if len(one.tokens) > 1]
    return Figures(
        requests=len(good),
        failed=len(timelines) - len(good),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(one.cached_tokens for one in good),
        output_tokens=output,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        ttft_ms=_spread([one.tokens[0] - one.arrived for one in good]),
        tpot_ms=_spread(
            [(one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) for one in several]
        ),
        itl_ms=_spread(np.concatenate([np.diff(one.tokens) for one in several] or [[]])),
        e2e_ms=_spread([one.tokens[-1] - one.arrived for one in good]),
    )


def _spread(seconds: Sequence[float] | np.ndarray) -> Spread | None:
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = (float(number) for number in np.percentile(ms, (50, 90, 99)))
    return Spread(float(ms.mean()), p50, p90, p99)
