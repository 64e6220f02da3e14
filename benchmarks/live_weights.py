"""Measures what a trainer does to a serving engine: updates of the weights, sleep and wake-up, in milliseconds.

    python -m benchmarks.live_weights
    python -m benchmarks.live_weights --shape tiny --dtype float32 --cache-bytes 1048576    # to try it on a CPU

Weights are random. The engine serves a prompt before each update and each sleep, so that there is something to drop.
Times are wall time until the device has finished. `compiled` counts the programs that later rounds than the first
have compiled.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.llm import LLM
from jaxkv.models.decoder import Decoder
from jaxkv.programs.manifest import compile_count

_PROMPT_TOKENS = 512


def serve(llm: LLM) -> None:
    """Generates a few tokens, so that the cache holds something."""
    prompt = np.random.default_rng(0).integers(1, llm.model.vocab_size, _PROMPT_TOKENS).tolist()
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))


def timed(llm: LLM, call: Callable[[], object]) -> float:
    """Returns the milliseconds of a call, until the device has finished."""
    start = time.perf_counter()
    call()
    jax.block_until_ready((llm.params, () if llm.engine.asleep else llm.engine.runner.cache.arrays))
    return (time.perf_counter() - start) * 1e3


def run(llm: LLM, trees: Sequence[Any], repeats: int) -> list[dict[str, Any]]:
    """Returns the rows of the record; the weights of `llm` are `trees[0]`."""
    times: dict[str, list[float]] = {"update_weights": [], "sleep": [], "wake_up": []}
    compiled = 0
    for repeat in range(repeats + 1):
        serve(llm)
        if repeat == 1:
            # The first round is the warm-up.
            compiled = compile_count()
            times = {name: [] for name in times}
        tree = trees[(repeat + 1) % 2]
        times["update_weights"].append(timed(llm, lambda tree=tree: llm.update_weights(tree)))
        serve(llm)
        times["sleep"].append(timed(llm, llm.sleep))
        times["wake_up"].append(timed(llm, llm.wake_up))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    return [
        {
            "operation": name,
            "bytes": weights if name == "update_weights" else llm.budget.bytes,
            "ms": statistics.median(taken),
            "slowest_ms": max(taken),
            "compiled": compile_count() - compiled,
        }
        for name, taken in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes the record `live-weights-SHAPE`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-bytes", type=int, default=70 * 10**9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    model = Decoder(SHAPES[options.shape])
    params = [model.init_params(jax.random.key(seed), options.dtype) for seed in (0, 1)]
    cache = CacheConfig(budget_bytes=options.cache_bytes, max_sequences=8)
    length = min(4096, model.max_positions)
    llm = LLM.from_parts(model, params[0], cache=cache, max_model_len=length, progress=False)
    with llm:
        rows = run(llm, params, options.repeats)
    path = save_record(f"live-weights-{options.shape}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
