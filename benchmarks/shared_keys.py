"""Samples of prompts: decode steps that read the keys which rows share once, and steps that read them for each row.

    python -m benchmarks.shared_keys --shape llama-3.1-8b --load 32x8x1024 8x32x4096 1x64x4096
    python -m benchmarks.shared_keys --shape tiny --load 3x4x200 --output-tokens 8

A load is PROMPTSxSAMPLESxTOKENS of random prompts, all at once, behind an empty prefix cache. One engine runs each load
both ways in turn, twice; the table has the second run of each. Times include the prompts, which are computed once.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RECORDS, save_record
from benchmarks.timing import refuse_profilers
from jaxkv.bench.modes import warm
from jaxkv.bench.serving import Served
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.config.cache import CacheConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request import Request
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import StepRows

_ROUNDS = 2


@dataclass(frozen=True)
class Load:
    """Some prompts with several samples each.

    Attributes:
        prompts: number of prompts.
        samples: samples of each.
        tokens: tokens of each prompt.
    """

    prompts: int
    samples: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Reads PROMPTSxSAMPLESxTOKENS."""
        return cls(*map(int, text.split("x")))

    def draw(self, vocab_size: int, output: int, seed: int) -> list[list[Request]]:
        """Returns the samples of each prompt."""
        draw = np.random.default_rng(seed)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        prompts = draw.integers(0, vocab_size, (self.prompts, self.tokens)).tolist()
        return [
            [Request(prompt=tuple(prompt), params=params, seed=0, stop_ids=())] * self.samples
            for prompt in prompts
        ]


def run(engine: Engine, groups: Sequence[Sequence[Request]], *, shares: bool) -> tuple[float, int]:
    """Returns the seconds of all samples, and how many programs ran that read shared keys once."""
    engine.clear_prefixes()
    runner: Any = engine.sequence_runner
    shapes: Any = engine.shapes
    step, may_share, sharing = runner.step, shapes.may_share, 0

    def count(shape: StepSpec, rows: StepRows) -> Any:  # noqa: ANN401 - passed through
        nonlocal sharing
        sharing += shape.shares
        return step(shape, rows)

    runner.step, shapes.may_share = count, lambda rows: shares and may_share(rows)
    try:
        start = time.perf_counter()
        states = [state for samples in groups for state in engine.add(samples)]
        engine.run(states)
        return time.perf_counter() - start, sharing
    finally:
        runner.step, shapes.may_share = step, may_share


def measure(engine: Engine, load: Load, vocab_size: int, output: int) -> dict[str, Any]:
    """Returns the row of a load."""
    groups = load.draw(vocab_size, output, seed=7)
    tokens = load.prompts * load.samples * output
    forms = [False, True] * _ROUNDS
    (alone, _), (together, sharing) = [run(engine, groups, shares=one) for one in forms][-2:]
    return {
        "prompts": load.prompts,
        "samples": load.samples,
        "prompt_tokens": load.tokens,
        "output_tokens": output,
        "sharing_programs": sharing,
        "own_tokens_per_s": tokens / alone,
        "shared_tokens_per_s": tokens / together,
        "times": alone / together,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen loads."""
    made = argparse.ArgumentParser(
        description="Times samples that share the reads of their prompt."
    )
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--load", nargs="+", type=Load.parse, help="PROMPTSxSAMPLESxTOKENS")
    made.add_argument("--output-tokens", type=int, default=256)
    made.add_argument("--folder", type=Path, default=RECORDS, help="where the record is written")
    options = made.parse_args(arguments)
    refuse_profilers()
    loads: list[Load] = options.load or [Load(32, 8, 1024), Load(8, 32, 4096), Load(1, 64, 4096)]
    output = options.output_tokens
    rows = max(load.prompts * load.samples for load in loads)
    longest = max(load.tokens for load in loads) + output
    engine = Served(
        shape=options.shape,
        dtype=options.dtype,
        max_model_len=longest,
        cache=CacheConfig(max_sequences=rows),
    ).build()
    warm(engine, Workload(prompt_tokens=(1, longest - 1), output_tokens=(1, 1)))
    # A server runs each program before the first request, too.
    run_steps(engine, [program.spec for program in engine.runner.programs.manifest()])
    found = []
    for load in loads:
        found.append(measure(engine, load, SHAPES[options.shape].vocab_size, output))
        print(*(f"{name}={value:.4g}" for name, value in found[-1].items()), flush=True)
    save_record(f"shared-keys-{options.shape}", found, folder=options.folder)


if __name__ == "__main__":
    main()
