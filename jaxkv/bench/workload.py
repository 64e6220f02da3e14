"""The requests of a benchmark and their arrival times, drawn from a seed, so that every run sends the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request

DATA = ("random", "shared-prefix")
LENGTHS = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of a benchmark; the defaults are nano-vllm's published benchmark.

    Attributes:
        data: "random" for independent prompts, "shared-prefix" for prompts with a common prefix.
        requests: number of requests.
        prompt_tokens, output_tokens: least and most tokens of a request; drawn uniformly.
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
        draw = np.random.default_rng(self.seed)
        common = draw.integers(0, vocab_size, self.prefix_tokens).tolist()
        if self.data == "random":
            common = []
        least, most = self.prompt_tokens
        prompts = draw.integers(least, most + 1, self.requests)
        outputs = draw.integers(self.output_tokens[0], self.output_tokens[1] + 1, self.requests)
        return [
            self._request(
                (*common, *draw.integers(0, vocab_size, prompt - len(common)).tolist()), int(output)
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _request(self, prompt: tuple[int, ...], output: int) -> Request:
        params = SamplingParams(temperature=self.temperature, max_tokens=output, ignore_eos=True)
        return Request(prompt=prompt, params=params, seed=self.seed, stop_ids=())


def arrivals(count: int, rate: float | None, seed: int) -> Sequence[float]:
    """Returns the arrival time of each request, in seconds from the start, ascending.

    Args:
        count: number of requests.
        rate: requests per second, as a Poisson process; `None` for all at once.
        seed: seed of the arrival times.

    Raises:
        ValueError: the rate is not above 0.
    """
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise ValueError(f"the request rate must be above 0 per second, got {rate}")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    # The first request arrives at 0.
    return (np.cumsum(gaps) - gaps[0]).tolist()
