"""`Recorder`: what a server has done, as counts and histograms. Few microseconds per request, less per token.

`jaxkv.serve.exposition` writes it for Prometheus, and the dashboard shows it.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from jaxkv.serve.generation import Counts

FINISH_REASONS = ("stop", "length", "abort", "error")

# The bounds are vLLM's, so that queries of its boards give comparable numbers.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM's begin at 0.01; a small model decodes faster.
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)

SECONDS_OF_RATES = 120
"""Seconds that `TokenRate` remembers."""


class Histogram:
    """Counts of values between bounds.

    Args:
        bounds: upper bounds of the buckets, ascending and inclusive; one bucket more has what is above.

    Attributes:
        bounds: the bounds.
        counts: number of values of each bucket.
        total: sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, which came `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class TokenRate:
    """Generated tokens of each of the last seconds.

    Args:
        now: seconds of a monotonic clock, as all times here.
    """

    def __init__(self, now: float) -> None:
        self._second = int(now)
        self._counts = deque([0], maxlen=SECONDS_OF_RATES + 1)

    def add(self, count: int, now: float) -> None:
        """Counts tokens that came now."""
        if now >= self._second + 1:
            self._advance(now)
        self._counts[-1] += count

    def seconds(self, now: float) -> list[int]:
        """Returns the tokens of each whole second, oldest first; the running second is not among them."""
        self._advance(now)
        return list(self._counts)[:-1]

    def _advance(self, now: float) -> None:
        second = max(int(now), self._second)
        self._counts.extend([0] * min(second - self._second, SECONDS_OF_RATES + 1))
        self._second = second


class Recorder:
    """Counts of a server since its start; a `CallWatcher` of all its calls.

    Attributes:
        prompt_tokens: tokens of the prompts whose first token came.
        generated_tokens: tokens that calls have read.
        preemptions: how often a request lost its pages and was computed again.
        finished: finish reason -> number of samples.
        rate: generated tokens per second.
        first_token_seconds: from a call's arrival to its first token.
        inter_token_seconds: between two tokens of a sample.
        token_seconds: mean time of a call between the tokens after the first, per sample and token.
        request_seconds: from a call's arrival to its end.
        queue_seconds: until the engine began the call.
        prefill_seconds: from there to its first token.
        decode_seconds: from its first token to its end.
        inference_seconds: from its beginning in the engine to its end.
        prompt_lengths, output_lengths: tokens of each prompt and of each sample.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.preemptions = 0
        self.finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self.rate = TokenRate(time.monotonic())
        self.first_token_seconds = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token_seconds = Histogram(_TOKEN_SECONDS)
        self.token_seconds = Histogram(_TOKEN_SECONDS)
        self.request_seconds = Histogram(_REQUEST_SECONDS)
        self.queue_seconds = Histogram(_REQUEST_SECONDS)
        self.prefill_seconds = Histogram(_REQUEST_SECONDS)
        self.decode_seconds = Histogram(_REQUEST_SECONDS)
        self.inference_seconds = Histogram(_REQUEST_SECONDS)
        lengths = [float(mantissa * 10**power) for power in range(7) for mantissa in (1, 2, 5)]
        self.prompt_lengths = Histogram(lengths)
        self.output_lengths = Histogram(lengths)

    def first_token(self, counts: Counts) -> None:
        """The first token of a call has come."""
        assert counts.first_token is not None, "the first token has come"
        self.prompt_tokens += counts.prompt_tokens
        self.first_token_seconds.observe(counts.first_token - counts.arrived)

    def tokens(self, count: int, gap: float | None, now: float) -> None:
        """A sample got `count` tokens now, `gap` seconds after those before; `None` for its first ones."""
        self.generated_tokens += count
        self.rate.add(count, now)
        if gap is not None:
            self.inter_token_seconds.observe(gap / count, count)

    def ended(self, counts: Counts) -> None:
        """All samples of a call have ended."""
        assert counts.finished is not None, "the call has ended"
        self.preemptions += counts.preemptions
        for reason in counts.reasons:
            self.finished[reason] += 1
        if counts.first_token is None:
            return
        whole, decode = counts.finished - counts.arrived, counts.finished - counts.first_token
        queued = min(counts.queue_seconds or 0.0, counts.first_token - counts.arrived)
        self.request_seconds.observe(whole)
        self.decode_seconds.observe(decode)
        self.queue_seconds.observe(queued)
        self.prefill_seconds.observe(whole - decode - queued)
        self.inference_seconds.observe(whole - queued)
        self.prompt_lengths.observe(float(counts.prompt_tokens))
        for length in counts.outputs:
            self.output_lengths.observe(float(length))
        longest = max(counts.outputs)
        if longest > 1:
            self.token_seconds.observe(decode / (longest - 1))
