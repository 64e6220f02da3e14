"""Serves several loads with one engine in this process, without a server, and prints their figures as JSON.

    python -m benchmarks.engine_loads --shape qwen3-0.6b --max-sequences 256 --load 256:256:512 --load 40:256:32:4

A load is REQUESTS:PROMPT_TOKENS:OUTPUT_TOKENS, with requests per second if they do not come all at once. Each step
program runs before the first load, as in a server, so that no load has the first runs. `benchmarks.server` starts this.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxkv.bench.workload import Workload


@dataclass(frozen=True)
class Load:
    """The requests of one measurement.

    Attributes:
        requests: number of requests.
        prompt_tokens, output_tokens: of each.
        rate: requests per second; `None` sends all at once.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None

    def __str__(self) -> str:
        """Returns it as `parse_load` reads it."""
        numbers = [self.requests, self.prompt_tokens, self.output_tokens]
        return ":".join(map(str, [*numbers, *([] if self.rate is None else [f"{self.rate:g}"])]))

    def workload(self, seed: int) -> Workload:
        """Returns the requests with prompts of a seed."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return Workload(
            requests=self.requests,
            prompt_tokens=(prompt, prompt),
            output_tokens=(output, output),
            seed=seed,
        )


def parse_load(text: str) -> Load:
    """Reads a load, see the module."""
    requests, prompt, output, *rate = text.split(":")
    return Load(int(requests), int(prompt), int(output), *map(float, rate))


def measure(
    shape: str, loads: Sequence[Load], *, max_sequences: int, max_model_len: int
) -> list[dict[str, Any]]:
    """Returns the figures of each load, one after another in one engine, with other prompts for each."""
    # JAX starts here, so that others may import `Load` without it.
    from jaxkv.bench.figures import figures_of
    from jaxkv.bench.serving import Served, serve
    from jaxkv.bench.workload import arrivals
    from jaxkv.config.cache import CacheConfig
    from jaxkv.engine.first_runs import run_steps
    from jaxkv.engine.warm_up import compile_all, declare_served

    cache = CacheConfig(max_sequences=max_sequences)
    engine = Served(shape=shape, max_model_len=max_model_len, cache=cache).build()
    needed = [
        spec
        for load in loads
        for spec in declare_served(engine, load.workload(0).example(), load.requests)
    ]
    needed = list(dict.fromkeys(needed))
    compile_all(engine.runner, needed)
    run_steps(engine, needed)
    found = []
    for seed, load in enumerate(loads):
        workload = load.workload(seed)
        steps, waited = engine.steps, engine.wait_seconds
        due = arrivals(load.requests, load.rate, seed)
        figures = figures_of(serve(engine, workload.draw(engine.runner.model.vocab_size), due))
        counts = {"steps": engine.steps - steps, "wait_seconds": engine.wait_seconds - waited}
        found.append(asdict(figures) | {"load": str(load)} | counts)
    assert engine.runner.programs.compiled_late == 0, "a program was compiled while it was measured"
    return found


def main() -> None:
    """Measures the loads of the command line and prints a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--load", type=parse_load, action="append", required=True)
    options = parser.parse_args()
    sizes = {"max_sequences": options.max_sequences, "max_model_len": options.max_model_len}
    print(json.dumps(measure(options.shape, options.load, **sizes)))


if __name__ == "__main__":
    main()
