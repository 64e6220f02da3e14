"""Rollouts of a trainer: prompts with several samples each, beside the least time that they take.

    python -m benchmarks.rollouts --steps-per-launch 1,8
    python -m benchmarks.rollouts --shape tiny --prompts 4 --samples 2 --length 16 --rows 4 --cache-bytes 4194304

Weights are random; samples are drawn at temperature 1 with log-probabilities, of prompts as long as the outputs. Each
round begins with `update_weights`, as in training, so no prefix is kept from the round before. The floor is the time
of all decode steps with every row in use (bytes of the weights, keys and values at the bandwidth of a matrix-vector
product, or FLOPs at the device's peak, whichever takes longer), and of each prompt once. The last rollout is replayed
by `score`, whose log-probabilities should be the same.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.decode_start import measure_read_bandwidth
from benchmarks.generate import Setting, decode_bytes
from benchmarks.prompt_floor import prompt_seconds
from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import CEILINGS, refuse_profilers
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.llm import LLM
from jaxkv.models.protocol import Params
from jaxkv.models.registry import build_model
from jaxkv.rollout import Rollout

_ITEM_BYTES = 2
"""Of a number in bfloat16."""


def floor_seconds(
    config: ModelConfig, params: Params, options: argparse.Namespace, bandwidth: float
) -> float:
    """Returns the least seconds of a rollout in bfloat16; prompts count nothing where the device's peak is unknown."""
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    peak = ceilings.matmul["bfloat16"] if ceilings else float("inf")
    flops = 2 * options.rows * decode_bytes(config, params, Setting(0, 0, 0, 0), 2) / _ITEM_BYTES
    read = [
        decode_bytes(config, params, Setting(options.rows, options.length + at, 0, 0), _ITEM_BYTES)
        for at in range(options.length)
    ]
    waves = options.prompts * options.samples / options.rows
    decode = waves * sum(max(step / bandwidth, flops / peak) for step in read)
    return decode + (prompt_seconds(config, params, [options.length] * options.prompts) or 0.0)


def run(llm: LLM, params: Params, options: argparse.Namespace, floor: float) -> dict[str, Any]:
    """Returns the row of one engine: the fastest of the rounds after the first."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(1, llm.model.vocab_size, (options.prompts, options.length)).tolist()
    wishes = {"n": options.samples, "max_tokens": options.length, "temperature": 1.0}
    sampling = SamplingParams(**wishes, ignore_eos=True, seed=0, logprobs=0)

    def timed() -> tuple[float, Rollout]:
        llm.update_weights(params)
        start = time.perf_counter()
        rollout = llm.rollout(prompts, sampling)
        return time.perf_counter() - start, rollout

    timed()
    taken = [timed()[0] for _ in range(options.rounds - 1)]
    steps = llm.engine.steps
    last, rollout = timed()
    steps, taken = llm.engine.steps - steps, [*taken, last]
    start = time.perf_counter()
    replayed = llm.score(prompts, rollout, sampling)
    replay = time.perf_counter() - start
    apart = [
        np.abs(one - told[mask])
        for one, told, mask in zip(replayed, rollout.logprobs, rollout.output_mask, strict=True)
    ]
    tokens, seconds = int(rollout.output_mask.sum()), min(taken)
    return {
        "batch_invariant": llm.engine.config.batch_invariant,
        "steps_per_launch": llm.engine.multi_step.chosen.number,
        "prompts": options.prompts,
        "samples": options.samples,
        "length": options.length,
        "rows": options.rows,
        "seconds": seconds,
        "slowest_seconds": max(taken),
        "tokens_per_s": tokens / seconds,
        "steps": steps,
        "floor_seconds": floor,
        "floor_percent": 100 * floor / seconds,
        "compiled_late": llm.engine.runner.programs.compiled_late,
        "replay_seconds": replay,
        "replay_tokens_that_differ": int(sum((one > 0).sum() for one in apart)),
        "replay_largest_difference": float(max(one.max() for one in apart)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes the record `rollouts-SHAPE`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt and an output")
    parser.add_argument("--rows", type=int, default=256, help="sequences of a step")
    parser.add_argument("--steps-per-launch", default="1", help="comma-separated")
    parser.add_argument("--invariant", default="off,on", help="batch_invariant: off, on, or both")
    parser.add_argument("--cache-bytes", type=int, default=30 * 10**9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    config, rows = SHAPES[options.shape], []
    params = build_model(config).init_params(jax.random.key(0), "bfloat16")
    floor = floor_seconds(config, params, options, measure_read_bandwidth())
    cache = CacheConfig(max_sequences=options.rows, budget_bytes=options.cache_bytes)
    ways = product(options.invariant.split(","), map(int, options.steps_per_launch.split(",")))
    for invariant, steps in ways:
        engine = EngineConfig(batch_invariant=invariant == "on", steps_per_launch=steps)
        wishes = {"cache": cache, "max_model_len": 2 * options.length, "engine": engine}
        with LLM.from_parts(build_model(config), params, progress=False, **wishes) as llm:
            rows.append(run(llm, params, options, floor))
        path = save_record(f"rollouts-{options.shape}", rows, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
