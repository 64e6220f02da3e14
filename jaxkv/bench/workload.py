"""The requests of a benchmark and their arrival times, drawn from a seed, so that every run sends the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request

DATA = ("random", "shared-prefix", "sharegpt")
LENGTHS = ("prompt_tokens", "output_tokens")

SHAREGPT_LENGTHS = {"prompt_tokens": (178, 1.6), "output_tokens": (138, 1.2)}
"""Median and sigma of log-normal lengths like those of ShareGPT's conversations.

Between 4 and 1024 tokens their means are 230 and 203, which vLLM's benchmark printed for 1000 conversations with Llama
3.1's tokenizer (vLLM's pull request 18566); the sigmas are our choice.
"""
SHAREGPT_BOUNDS = (4, 1024)
"""Least and most tokens of those lengths, unless the user gives others."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of a benchmark; the defaults are nano-vllm's published benchmark.

    Attributes:
        data: "random" for independent prompts, "shared-prefix" for prompts with a common prefix, "sharegpt" for
            independent prompts with lengths like those of ShareGPT's conversations.
        requests: number of requests.
        prompt_tokens, output_tokens: least and most tokens of a request; drawn uniformly, or log-normally with
            "sharegpt".
        prefix_tokens: tokens of the common prefix with "shared-prefix"; fewer than those of the shortest prompt.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of prompts, lengths and arrival times.

    Raises:
        ValueError: a field is out of range.
    """

    data: str = "random"
    requests: int = 256
    prompt_tokens: tuple[int, int] = (100, 1024)
    output_tokens: tuple[int, int] = (100, 1024)
    prefix_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError` for fields out of range."""
        if self.data not in DATA:
            raise ValueError(f"data must be one of {', '.join(DATA)}, got {self.data!r}")
        as_int("the number of requests", self.requests, 1, 2**20)
        for name in LENGTHS:
            least, most = getattr(self, name)
            as_int(f"the least of {name}", least, 1, 2**24)
            as_int(f"the most of {name}", most, least, 2**24, f"the least is {least}")
        if self.data == "shared-prefix":
            shortest = self.prompt_tokens[0]
            why = f"the shortest prompt has {shortest} tokens"
            as_int("prefix_tokens", self.prefix_tokens, 1, shortest - 1, why)

    def clipped(self, limit: int, *names: str) -> "Workload":
        """Returns the workload with some of its lengths clipped, so that the longest prompt and output fit together.

        Args:
            limit: most tokens of a prompt and its output together; 2 or more.
            names: the lengths that may be clipped: "prompt_tokens", "output_tokens".
        """
        if not names or self.longest <= limit:
            return self
        kept = sum(getattr(self, name)[1] for name in LENGTHS if name not in names)
        most = max(1, (limit - kept) // len(names))
        lengths = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{
                name: (min(least, most), min(high, most)) for name, (least, high) in lengths.items()
            },
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and output together."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def example(self) -> Request:
        """Returns a request with the longest prompt and output, for the warm-up."""
        return self._request((0,) * self.prompt_tokens[1], self.output_tokens[1])

    def draw(self, vocab_size: int) -> list[Request]:
        """Returns the requests; each ends after its number of output tokens and ignores end ids."""
        return [self._request(prompt, output) for prompt, output in self.draw_ids(vocab_size)]

    def draw_ids(self, vocab_size: int) -> list[tuple[tuple[int, ...], int]]:
        """Returns the token ids of each prompt, below `vocab_size`, and its number of output tokens."""
        draw = np.random.default_rng(self.seed)
        common = draw.integers(0, vocab_size, self.prefix_tokens).tolist()[: self.common_tokens]
        return [
            ((*common, *draw.integers(0, vocab_size, prompt - len(common)).tolist()), output)
            for prompt, output in self.draw_lengths(draw)
        ]

    @property
    def common_tokens(self) -> int:
        """Tokens that all prompts have in common."""
        return self.prefix_tokens if self.data == "shared-prefix" else 0

    def draw_lengths(self, draw: np.random.Generator) -> list[tuple[int, int]]:
        """Returns the number of prompt and output tokens of each request."""
        prompts, outputs = (self._lengths(draw, name) for name in LENGTHS)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))

    def _lengths(self, draw: np.random.Generator, name: str) -> np.ndarray:
        least, most = getattr(self, name)
        if self.data != "sharegpt":
            return draw.integers(least, most + 1, self.requests)
        median, sigma = SHAREGPT_LENGTHS[name]
        normal = NormalDist(math.log(median), sigma)
        # The inverse of the distribution function, between the bounds, rounded to the nearest token.
        low, high = normal.cdf(math.log(least)), normal.cdf(math.log(most))
        below = draw.uniform(low, high, self.requests).clip(1e-15, 1 - 1e-15)
        lengths = [math.exp(normal.inv_cdf(share)) for share in below.tolist()]
        return np.rint(lengths).astype(int).clip(least, most)

    def _request(self, prompt: tuple[int, ...], output: int) -> Request:
        params = SamplingParams(temperature=self.temperature, max_tokens=output, ignore_eos=True)
        return Request(prompt=prompt, params=params, seed=self.seed, stop_ids=())


def arrivals(count: int, rate: float | None, seed: int, burstiness: float = 1.0) -> Sequence[float]:
    """Returns the arrival time of each request, in seconds from the start, ascending.

    Args:
        count: number of requests.
        rate: requests per second; `None` for all at once.
        seed: seed of the arrival times.
        burstiness: shape of the gamma distribution of the gaps, as vLLM's: 1 is a Poisson process, less comes in
            bursts, more is steadier.

    Raises:
        ValueError: the rate or the burstiness is not above 0.
    """
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise ValueError(f"the request rate must be above 0 per second, got {rate}")
    if not 0 < burstiness < float("inf"):
        raise ValueError(f"the burstiness must be above 0, got {burstiness}")
    draw = np.random.default_rng(seed)
    if burstiness == 1:
        gaps = draw.exponential(1 / rate, count)
    else:
        gaps = draw.gamma(burstiness, 1 / (rate * burstiness), count)
    # The first request arrives at 0.
    return (np.cumsum(gaps) - gaps[0]).tolist()
