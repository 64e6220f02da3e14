"""Serving metrics (throughput, TTFT, TPOT, ITL) computed from the times of tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(kw_only=True)
class Timeline:
    """One request as its user saw it; seconds of one clock.

    Attributes:
        prompt_tokens: of the prompt.
        cached_tokens: of these, those that were not computed again.
        arrived: when it was due, which may be before the engine heard of it.
        tokens: when each of its tokens was handed out.
        failed: it ended in an error.
    """

    prompt_tokens: int
    arrived: float
    cached_tokens: int = 0
    tokens: list[float] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True)
class Spread:
    """Some durations in milliseconds; percentiles lie between the two nearest ones."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The metrics of one benchmark run.

    Attributes:
        requests, failed: that ended with all their tokens, or with an error.
        seconds: from the first arrival to the last token.
        prompt_tokens, cached_tokens, output_tokens: of all requests.
        requests_per_second, output_tokens_per_second, total_tokens_per_second: over `seconds`; the total counts
            prompts, cached or not.
        ttft_ms: time to first token: from a request's arrival to its first token.
        tpot_ms: time per output token: a request's mean time from one token to the next; of requests of two or more.
        itl_ms: inter-token latency: every single time from one token to the next.
        e2e_ms: from a request's arrival to its last token.
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
        """Returns the figures as JSON has them, spreads as dictionaries."""
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
    """Returns the figures of a run; what failed counts in `failed` alone.

    Raises:
        ValueError: nothing came to an end.
    """
    good = [line for line in timelines if line.tokens and not line.failed]
    if not good:
        raise ValueError(
            f"none of {len(timelines)} requests gave a token, so there is nothing to tell"
        )
    seconds = max(line.tokens[-1] for line in good) - min(line.arrived for line in timelines)
    prompt = sum(line.prompt_tokens for line in good)
    output = sum(len(line.tokens) for line in good)
    several = [line for line in good if len(line.tokens) > 1]
    return Figures(
        requests=len(good),
        failed=len(timelines) - len(good),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(line.cached_tokens for line in good),
        output_tokens=output,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        ttft_ms=_spread([line.tokens[0] - line.arrived for line in good]),
        tpot_ms=_spread(
            [(line.tokens[-1] - line.tokens[0]) / (len(line.tokens) - 1) for line in several]
        ),
        itl_ms=_spread(np.concatenate([np.diff(line.tokens) for line in several] or [[]])),
        e2e_ms=_spread([line.tokens[-1] - line.arrived for line in good]),
    )


def _spread(seconds: Sequence[float] | np.ndarray) -> Spread | None:
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = (float(number) for number in np.percentile(ms, (50, 90, 99)))
    return Spread(float(ms.mean()), p50, p90, p99)
