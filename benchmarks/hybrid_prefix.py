"""Measures prefix reuse in a hybrid model of a real shape: time to the first token, and computed prompt tokens.

    python -m benchmarks.hybrid_prefix
    python -m benchmarks.hybrid_prefix --shape tiny-hybrid --dtype float32 --tokens 768    # to try it on a CPU

Weights are random. The record `hybrid-first-token` has a prompt of which nothing, nine tenths or everything is cached.
`hybrid-computed-tokens` has two traces: "repeated", two prompts that are sent twice each, and "branching", five prompts
with common prefixes. The counts do not depend on the depth, so that model has only the first layers of the shape.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.shapes import HYBRID_SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import RequestState
from jaxkv.models.registry import build_model
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner

Row = dict[str, Any]

_KEPT = 0.9
# A multiple of the shapes' chunks, where checkpoints are.
_GRID = 256
_WARM_UPS = 2
# The traces' page, and the policy that their counts were worked out for.
_PAGE = 256
_POLICY = CheckpointPolicy(end_of_prompt=False, end_of_generation=False, grid=_PAGE)
_CHECKPOINT_BYTES = 2**31
# Among those of the real shape is one that attends.
_COUNTED_LAYERS = 6


class _Bench:
    """A model with random weights, and engines that use it with separate caches.

    Args:
        options: options of the command line.
        layers: number of layers of the model, the first ones of the shape.
    """

    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        config = HYBRID_SHAPES[options.shape]
        cut = {"windows": config.windows[:layers], "pattern": config.pattern[:layers]}
        self.options, self.config = options, replace(config, num_layers=layers, **cut)
        self.model = build_model(self.config)
        drawn = self.model.init_params(jax.random.key(0), options.dtype)
        self.params = jax.block_until_ready(drawn)
        self.rng = np.random.default_rng(0)
        self.programs: dict[Any, Programs] = {}

    def engine(
        self,
        *,
        rows: int,
        longest: int,
        budget: int,
        policy: CheckpointPolicy,
        page: int,
        full_hits: bool,
    ) -> Engine:
        """Returns an engine for `rows` sequences of up to `longest` tokens and steps of up to `budget` tokens."""
        cache = CacheConfig(
            max_sequences=rows,
            page_size=page,
            checkpoint_bytes=_CHECKPOINT_BYTES,
            full_hits=full_hits,
        )
        layout, plan = plan_cache(
            self.model, cache, dtype=self.options.dtype, max_model_len=longest, free_bytes=None
        )
        sequence_runner = SequenceRunner(
            ModelRunner(
                self.model,
                self.params,
                layout,
                plan.counts,
                self.programs.setdefault((longest, full_hits), Programs()),
            ),
            max_tokens=longest,
            max_rows=rows,
        )
        return Engine(sequence_runner, None, EngineConfig(token_budget=budget, checkpoints=policy))

    def text(self, count: int) -> tuple[int, ...]:
        """Returns the tokens of a random prompt."""
        return tuple(self.rng.integers(0, self.config.vocab_size, count).tolist())

    def add(self, engine: Engine, prompt: tuple[int, ...], output: int = 1) -> RequestState:
        """Adds a greedy request for `output` tokens to an engine."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return engine.add([Request(prompt=prompt, params=params, seed=0, stop_ids=())])[0]


def first_tokens(bench: _Bench) -> list[Row]:
    """Times single requests of whose prompt nothing, nine tenths or everything is cached, alternately."""
    tokens, repeats = bench.options.tokens, bench.options.repeats
    kept = int(_KEPT * tokens) // _GRID * _GRID
    engine = bench.engine(
        rows=2,
        longest=tokens + 64,
        budget=tokens,
        policy=CheckpointPolicy(),
        page=64,
        full_hits=True,
    )

    def timed(prompt: tuple[int, ...], cached: int) -> float:
        start = time.perf_counter()
        made = bench.add(engine, prompt)
        engine.run([made])
        took = time.perf_counter() - start
        if made.cached != cached:
            raise RuntimeError(f"{made.cached} tokens of the prompt were kept, not {cached}")
        return took * 1e3

    shared = bench.text(kept)
    times: dict[str, list[float]] = {"cold": [], "90% kept": [], "all kept": []}
    for repeat in range(_WARM_UPS + repeats):
        cold = timed(bench.text(tokens), 0)
        timed(shared, kept if repeat else 0)
        hit = timed(shared + bench.text(tokens - kept), kept)
        full = timed(shared, kept)
        if repeat >= _WARM_UPS:
            for name, took in zip(times, (cold, hit, full), strict=True):
                times[name].append(took)
    median = {name: statistics.median(took) for name, took in times.items()}
    return [
        {
            "shape": bench.options.shape,
            "request": name,
            "prompt_tokens": kept if name == "all kept" else tokens,
            "cached_tokens": 0 if name == "cold" else kept,
            "ttft_ms": median[name],
            "spread_ms": max(took) - min(took),
            "times_sooner_than_cold": median["cold"] / median[name],
        }
        for name, took in times.items()
    ]


def computed_tokens(bench: _Bench) -> list[Row]:
    """Counts the computed prompt tokens of repeated prompts, without and with cached outputs, and of branching ones."""

    def count(trace: str, steps: Sequence[Sequence[tuple[int, ...]]], full_hits: bool) -> Row:
        engine = bench.engine(
            rows=6, longest=1280, budget=1200, policy=_POLICY, page=_PAGE, full_hits=full_hits
        )
        # Requests of the branching trace run until its end; those of the other one come one after the other.
        holds = trace == "branching"
        for prompts in steps:
            made = [bench.add(engine, prompt, 100 if holds else 1) for prompt in prompts]
            while not all(one.generated for one in made):
                engine.step()
        total = sum(len(prompt) for prompts in steps for prompt in prompts)
        stats = engine.prefix.stats if engine.prefix else None
        if stats is None or stats.tokens_computed + stats.tokens_reused != total:
            raise RuntimeError(f"{stats} does not add up to {total} tokens")
        return {
            "shape": bench.options.shape,
            "trace": trace,
            "layers": bench.config.num_layers,
            "outputs_kept": full_hits,
            "prompt_tokens": total,
            "computed_tokens": stats.tokens_computed,
        }

    half, rest = bench.text(256), bench.text(256)
    equal = [[half], [half], [half + rest], [half + rest]]
    first, second, third, fourth, fifth = map(bench.text, (300, 544, 288, 332, 288))
    branch = first[:256] + second
    branches = [
        [first],
        [branch],
        [branch[:512] + third, branch[:768] + fourth],
        [branch[:512] + fifth],
    ]
    return [
        count("repeated", equal, full_hits=False),
        count("repeated", equal, full_hits=True),
        count("branching", branches, full_hits=False),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both parts; each is printed and recorded as soon as it is done."""
    parser = argparse.ArgumentParser(description="Times and counts what kept prefixes save.")
    parser.add_argument("--shape", choices=sorted(HYBRID_SHAPES), default="granite-4.0-h-micro")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=10240, help="of the prompts that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="times,counts", help="comma-separated")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args(arguments)
    depth = HYBRID_SHAPES[options.shape].num_layers
    parts = {
        "times": ("hybrid-first-token", first_tokens, depth),
        "counts": ("hybrid-computed-tokens", computed_tokens, min(depth, _COUNTED_LAYERS)),
    }
    asked = options.parts.split(",")
    unknown = [part for part in asked if part not in parts]
    if unknown:
        parser.error(f"--parts must be among {', '.join(parts)}, got {unknown[0]}")
    refuse_profilers()
    for name, measure, layers in map(parts.__getitem__, asked):
        path = save_record(name, measure(_Bench(options, layers)), folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
