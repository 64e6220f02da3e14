"""Compares every form of a decode step with its bandwidth floor, in one process and with the same weights.

    python -m benchmarks.decode_floor --shape llama-3.1-8b --batch 1,8,64
    python -m benchmarks.decode_floor --shape qwen3-0.6b --batch 1,16,256 --parts forms,engine

Parts, for each batch size:
- "forms": the loop on the device (`jaxkv.generate`), and steps fed from the host
- "engine": the engine's loop, its host time, and a table of its kernels
- "sampled": steps that sample with top-k, top-p and min-p
- "products": steps with XLA's matrix products instead of jaxkv's kernels
- "first-token": time until every prompt has a token
- "peer": a decoder in the design of gpt-fast (torch_decode.py)

Records: decode-floor-SHAPE, decode-floor-SHAPE-kernels and decode-floor-SHAPE-first-token. The column "refused" has the
reason why a part cannot run here.
"""

import argparse
import gc
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

# The torch peer needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np

from benchmarks.decode_start import decode_parser, draw_weights, parse
from benchmarks.generate import (
    Setting,
    decode_bytes,
    make_requests,
    make_sequence_runner,
    time_loop,
    time_steps,
)
from benchmarks.prompt_floor import prompt_seconds
from benchmarks.record import save_record
from benchmarks.steady import Observed, Row, steady_tokens
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.protocol import Params
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.features import Features
from pallas_kernels.dispatch import Unsupported

PARTS = ("forms", "engine", "sampled", "products", "first-token", "peer")
SAMPLED: dict[str, dict[str, Any]] = {
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.9, min-p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
_RECORD = "decode-floor"
_STEPS = "steps, overlapped"
_ENGINE = "engine"
Clock = Callable[..., dict[str, float]]


class Floor:
    """One batch size under measurement.

    Args:
        options: options of the command line.
        params: parameters of the shape's model.
        batch: number of sequences.
        bandwidth: read bandwidth of the floor, bytes per second.
    """

    def __init__(
        self, options: argparse.Namespace, params: Params, batch: int, bandwidth: float
    ) -> None:
        self.options, self.params, self.bandwidth = options, params, bandwidth
        self.config = SHAPES[options.shape]
        self.setting = Setting(batch, options.context, options.new_tokens, options.repeats)
        self.itemsize = jax.tree.leaves(params)[0].dtype.itemsize
        self.kernels: list[Row] = []
        self.first: list[Row] = []
        budget = EngineConfig().token_budget
        steady = steady_tokens(batch, options.context, options.steps, budget)
        length = options.context + max(options.new_tokens, steady)
        chosen = options.implementation
        self.sequence_runner = make_sequence_runner(
            self.config, self.setting, params, chosen, length
        )

    def rows(self, part: str) -> Iterator[Row]:
        """Yields the rows of one part, each as soon as it is measured."""
        parts: dict[str, Callable[[], Iterator[Row]]] = {
            "forms": self._forms,
            "engine": self._engine,
            "sampled": self._sampled,
            "products": self._products,
            "first-token": self._first_tokens,
            "peer": self._peer,
        }
        yield from parts[part]()

    def _row(self, form: str, ms: float | None, **more: Any) -> Row:  # noqa: ANN401 - columns
        context = more.pop("context", self.setting.context + self.setting.new_tokens / 2)
        at_middle = Setting(self.setting.batch, round(context), 0, 0)
        num_bytes = decode_bytes(self.config, self.params, at_middle, self.itemsize)
        floor = num_bytes / self.bandwidth * 1e3
        return {
            "batch": self.setting.batch,
            "form": form,
            "ms_per_step": ms,
            "floor_ms": floor,
            "ratio_to_floor": ms and ms / floor,
            "host_ms": None,
            "spread_ms": None,
            "context": context,
            "refused": None,
            **more,
        }

    def _timed(
        self,
        sequence_runner: SequenceRunner,
        clock: Clock,
        **sampling: Any,  # noqa: ANN401 - options
    ) -> dict[str, float]:
        """Reserves the rows, and returns the result of a timing function of `benchmarks.generate`."""
        requests = make_requests(self.config, self.setting, **sampling)
        with ExitStack() as held:
            places = [
                held.enter_context(sequence_runner.reserved(one.tokens_held)) for one in requests
            ]
            rows = [one.row(place) for one, place in zip(requests, places, strict=True)]
            return clock(sequence_runner, rows, requests, self.setting)

    def _steps(self, sequence_runner: SequenceRunner, form: str, **sampling: Any) -> Row:  # noqa: ANN401 - options
        timed = self._timed(sequence_runner, partial(time_steps, overlapped=True), **sampling)
        told = {"host_ms": timed["enqueue_ms"], "spread_ms": timed["spread_ms"]}
        return self._row(form, timed["ms_per_token"], **told)

    def _forms(self) -> Iterator[Row]:
        timed = self._timed(self.sequence_runner, time_loop)
        yield self._row("generate", timed["ms_per_token"], spread_ms=timed["spread_ms"])
        yield self._steps(self.sequence_runner, _STEPS)
        timed = self._timed(self.sequence_runner, partial(time_steps, overlapped=False))
        told = {"host_ms": timed["enqueue_ms"], "spread_ms": timed["spread_ms"]}
        yield self._row("steps, in turn", timed["ms_per_token"], **told)
        self._first_row("all prompts in one step", timed["prompt_ms"], timed["prompt_ms"])

    def _sampled(self) -> Iterator[Row]:
        greedy = self._steps(self.sequence_runner, "greedy, again")
        yield greedy
        for name, sampling in SAMPLED.items():
            row = self._steps(self.sequence_runner, name, temperature=0.8, **sampling)
            over = 100 * (row["ms_per_step"] / greedy["ms_per_step"] - 1)
            yield row | {"over_greedy_percent": over}

    def _products(self) -> Iterator[Row]:
        form = f"{_STEPS}, XLA's products"
        try:
            sequence_runner = make_sequence_runner(
                self.config, self.setting, self.params, "xla_products"
            )
        except Unsupported as reason:
            yield self._row(form, None, refused=str(reason))
            return
        yield self._steps(sequence_runner, form)

    def _observed(self, steps: int | None) -> Observed:
        config = EngineConfig(prefix_cache=False, steps_per_launch=steps)
        return Observed(Engine(self.sequence_runner, None, config), self.config)

    def _engine(self) -> Iterator[Row]:
        """Times the engine; if it launches several steps at once, also with one step per launch."""
        seen = self._observed(self.options.steps_per_launch)
        several = self._warm(seen.engine)
        if several:
            yield self._engine_row(f"{_ENGINE}, one step per launch", self._observed(1))
        yield self._engine_row(_ENGINE, seen)
        self.kernels += [{"batch": self.setting.batch, **kernel} for kernel in seen.kernels]

    def _warm(self, engine: Engine) -> bool:
        """Compiles programs of several steps per launch, as `LLM.warm_up` does; returns whether there are any."""
        batch, context = self.setting.batch, self.options.context
        output = steady_tokens(batch, context, self.options.steps, engine.config.token_budget)
        singles = {
            engine.shapes.choose(batch, batch, Features(), total_tokens=context + generated)
            for generated in range(output + 1)
        }
        several = engine.multi_step.declare(list(singles))
        engine.runner.compile_all(several)
        return bool(several)

    def _engine_row(self, form: str, seen: Observed) -> Row:
        options = self.options
        told = seen.steady(self.setting.batch, options.context, options.steps, self.bandwidth)
        host_ms = told["step_ms"] - told["wait_ms"]
        row = self._row(form, told["step_ms"], context=told["context"], host_ms=host_ms)
        names = ("plan", "pack", "enqueue", "collect", "queued", "gpu_busy")
        shares = {f"{name}_ms": told[f"{name}_ms"] for name in names}
        return row | {"steps_per_launch": told["steps_per_launch"]} | shares

    def _first_tokens(self) -> Iterator[Row]:
        seen = self._observed(self.options.steps_per_launch)
        times = [
            seen.first_tokens(seen.requests(self.setting.batch, self.setting.context, 1, seed))
            for seed in range(self.setting.repeats + 1)
        ]
        # The first run compiles.
        first, last = (statistics.median(one[side] for one in times[1:]) * 1e3 for side in (0, 1))
        self._first_row(_ENGINE, first, last)
        yield from ()

    def _first_row(self, form: str, first_ms: float, last_ms: float) -> None:
        lengths = [self.setting.context] * self.setting.batch
        floor = prompt_seconds(self.config, self.params, lengths)
        self.first.append(
            {
                "batch": self.setting.batch,
                "form": form,
                "prompt_tokens": self.setting.context,
                "first_ms": first_ms,
                "last_ms": last_ms,
                "floor_ms": floor and floor * 1e3,
                "ratio_to_floor": floor and last_ms / floor / 1e3,
            }
        )

    def _peer(self) -> Iterator[Row]:
        form = "torch, gpt-fast style"
        reason = None if importlib.util.find_spec("torch") else "torch is not installed"
        if jax.default_backend() != "gpu":
            reason = "needs a GPU, for whose graphs it is made"
        if reason is not None:
            yield self._row(form, None, refused=reason)
            return
        from benchmarks.torch_decode import time_decoder

        prompts = np.array([one.prompt for one in make_requests(self.config, self.setting)])
        timed = time_decoder(self.config, self.params, prompts, self.setting)
        self._first_row(f"{form}, prompts uncompiled", timed["prompt_ms"], timed["prompt_ms"])
        yield self._row(form, timed["ms_per_token"], spread_ms=timed["spread_ms"])


def _show(row: Row) -> None:
    if row["ms_per_step"] is None:
        print(f"batch {row['batch']:3d}  {row['form']:42s} not timed: {row['refused']}", flush=True)
        return
    host = "" if row["host_ms"] is None else f"  host {row['host_ms']:6.3f}"
    over = row.get("over_greedy_percent")
    print(
        f"batch {row['batch']:3d}  {row['form']:42s} {row['ms_per_step']:7.3f} ms  floor {row['floor_ms']:6.3f}  "
        f"x{row['ratio_to_floor']:5.2f}{host}" + ("" if over is None else f"  {over:+.1f}%"),
        flush=True,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = decode_parser(
        "Holds decode steps against their floor.", record=_RECORD, new_tokens=64, repeats=3
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=64, help="of the engine")
    parser.add_argument("--steps-per-launch", type=int, help="the engine chooses if not given")
    options = parse(parser, arguments, record=_RECORD)
    unknown = [part for part in options.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {unknown[0]}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and records."""
    options = _parse(arguments)
    params, bandwidth = draw_weights(options)
    name = options.record
    tables: dict[str, list[Row]] = {name: [], f"{name}-kernels": [], f"{name}-first-token": []}
    rows, kernels, first = tables.values()
    for batch in (int(size) for size in options.batch.split(",")):
        floor = Floor(options, params, batch, bandwidth)
        for part in options.parts.split(","):
            for row in floor.rows(part):
                _show(row)
                rows.append(row)
            for row in floor.first:
                told = f"batch {batch:3d}  first tokens, {row['form']}"
                print(f"{told}: {row['first_ms']:.1f} to {row['last_ms']:.1f} ms", flush=True)
            kernels += floor.kernels
            first += floor.first
            floor.kernels, floor.first = [], []
            # After each part, so that a run which is cut short leaves what it had.
            for table in (table for table in tables if tables[table]):
                save_record(table, tables[table], folder=options.folder)
        # What was watched refers to itself, and holds a cache.
        del floor
        gc.collect()
    print("recorded in", *(options.folder / f"{table}.json" for table in tables if tables[table]))


if __name__ == "__main__":
    main()
