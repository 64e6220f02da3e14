"""Times the engine with random weights of a real model's shape: start-up, decode, first tokens, and whole workloads.

    JAXKV_COMPILE_CACHE=EMPTY_FOLDER python -m benchmarks.engine --shape qwen3-0.6b --parts startup
    JAXKV_COMPILE_CACHE=SAME_FOLDER python -m benchmarks.engine --shape qwen3-0.6b
    python -m benchmarks.hf_serving --shape qwen3-0.6b

The first command measures a cold start, the second a warm start and all other parts, the third the peer. With
`--background` a start is over once a few programs serve for all, and requests are timed until the others are there and
for five seconds after that. Every part is printed and recorded as soon as it is done.

The GPU's idle share in steady decode is 1 - busy / step: "busy" is the time per step that its streams are busy under
the profiler, "step" the time per step without the profiler. The table also has the time per step of the same program
queued repeatedly, without packing and reading.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.decode_start import measure_read_bandwidth
from benchmarks.generate import Setting, decode_bytes
from benchmarks.prompt_floor import prompt_seconds
from benchmarks.record import RECORDS, save_record
from benchmarks.steady import Observed, Row, steady_tokens
from benchmarks.stopwatch import process_seconds
from benchmarks.timing import refuse_profilers
from jaxkv.bench.figures import figures_of
from jaxkv.bench.modes import warm
from jaxkv.bench.serving import Served, serve
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request import Request
from jaxkv.engine.warm_up import WarmUp
from jaxkv.memory import without_old_objects
from jaxkv.models.protocol import Params

PARTS = ("startup", "steady", "first-token", "throughput", "loads")
LONG_PROMPT = 2048
SHORT_PROMPTS = (32, 64, 96, 100, 128, 192)

LOADS = {
    "prompt-heavy": Workload(seed=1, prompt_tokens=(2048, 2048), output_tokens=(128, 128)),
    "output-heavy": Workload(seed=2, prompt_tokens=(128, 128), output_tokens=(2048, 2048)),
    "shared-prefix": Workload(
        seed=3,
        data="shared-prefix",
        prefix_tokens=1024,
        prompt_tokens=(1152, 1536),
        output_tokens=(128, 256),
    ),
}
"""Workloads of part "loads", each of 256 requests at once.

Their seeds differ, so that none finds the prompts of another in the cache.
"""


class Bench:
    """An engine of one shape under measurement.

    Args:
        options: options of the command line.
        age: seconds from the start of the process until its imports are done.
    """

    def __init__(self, options: argparse.Namespace, age: float) -> None:
        self.options = options
        self.config = SHAPES[options.shape]
        self.workload = Workload(
            requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            temperature=options.temperature,
        )
        steady = options.context + max(
            steady_tokens(batch, options.context, options.steps, options.token_budget)
            for batch in options.batch
        )
        loads = LOADS.values() if "loads" in options.parts.split(",") else ()
        workloads = [self.workload.longest, *(load.longest for load in loads)]
        longest = max(*workloads, options.long_prompt + 2, steady)
        served = Served(
            shape=options.shape,
            dtype=options.dtype,
            max_model_len=longest,
            cache=CacheConfig(max_sequences=options.max_sequences),
            engine=EngineConfig(
                token_budget=options.token_budget, steps_per_launch=options.steps_per_launch
            ),
        )
        start = time.perf_counter()
        self.engine: Engine = served.build()
        built = time.perf_counter()
        # One long prompt more than the workload has decides how long tables are.
        example = replace(self.workload, prompt_tokens=(1, longest - 1), output_tokens=(1, 1))
        nothing = WarmUp(0, 0, 0.0, 0.0, 0)
        background = options.background
        warm_up = nothing if options.lazy else warm(self.engine, example, background=background)
        ready = time.perf_counter()
        self.seen = Observed(self.engine, self.config, temperature=options.temperature)
        [line] = serve(self.engine, self.seen.requests(1, 64, 2), [0.0])
        self.startup: Row = {
            "kind": "warm" if warm_up.loaded == warm_up.programs else "cold",
            "programs": warm_up.programs,
            "loaded": warm_up.loaded,
            "import_s": age,
            "weights_and_cache_s": built - start,
            "programs_s": warm_up.seconds,
            "tracing_and_lowering_s": warm_up.host_seconds,
            "start_up_s": age + ready - start,
            "first_token_s": line.tokens[0],
            "most_temporary_mib": warm_up.temp_bytes / 2**20,
        }
        if warm_up.pending:
            self.startup |= self._in_background(warm_up.pending, ready)
        self._run_programs()

    def _in_background(self, pending: int, ready: float) -> Row:
        """Serves eight requests at a time until all programs are compiled, and some more afterwards.

        Args:
            pending: programs that were not compiled when the engine was ready.
            ready: `time.perf_counter()` at that moment.
        """
        programs = self.engine.runner.programs
        self._run_programs()
        found = self._waves("meanwhile", 10_000, lambda: programs.pending > 0)
        compiled = time.perf_counter()
        self._run_programs()
        found |= self._waves("afterwards", 20_000, lambda: time.perf_counter() < compiled + 5)
        return {"pending": pending, "all_programs_s": compiled - ready, **found}

    def _waves(self, when: str, seed: int, goes_on: Callable[[], bool]) -> Row:
        """Serves eight requests at a time, and returns their figures, named after `when`.

        Prompts are drawn from the seeds from `seed` on, so that no prefix of an earlier one is hit.
        """
        timelines, prompt, output = [], self.options.context // 4, self.options.steps
        began = time.perf_counter()
        while not timelines or goes_on():
            asked = self.seen.requests(8, prompt, output, seed=seed + len(timelines))
            timelines += serve(self.engine, asked, [0.0] * len(asked))
        seconds, figures = time.perf_counter() - began, figures_of(timelines)
        row = {
            "requests": figures.requests,
            "cached_tokens": figures.cached_tokens,
            "tokens_per_second": figures.output_tokens / seconds,
        }
        for name, spread in (("first_token", figures.ttft_ms), ("between_tokens", figures.itl_ms)):
            row |= {f"{name}_p50_ms": spread.p50, f"{name}_p99_ms": spread.p99} if spread else {}
        return {f"{when}_{name}": value for name, value in row.items()}

    def _run_programs(self) -> None:
        """Runs each program, as a server does before the first request."""
        run_steps(self.engine, [program.spec for program in self.engine.runner.programs.manifest()])

    def first_tokens(self) -> list[Row]:
        """Times the first token of single requests: short ones, and long ones with and without a cached prefix."""
        repeats, rows = self.options.repeats, []
        for length in SHORT_PROMPTS:
            times = [
                self._first(self.seen.requests(1, length, 1, 100 + at)[0]) for at in range(repeats)
            ]
            rows.append(self._first_row(f"prompt of {length}", length, times))
        long, kept = self.options.long_prompt, int(0.9 * self.options.long_prompt)
        cold, hit = [], []
        for at in range(repeats):
            draw = np.random.default_rng(500 + at)
            first = self.seen.request(draw, long, 1)
            cold.append(self._first(first))
            hit.append(self._first(self.seen.request(draw, long, 1, first.prompt[:kept])))
        rows.append(self._first_row("cold", long, cold))
        rows.append(self._first_row("90% kept", long, hit))
        return rows

    def _first(self, request: Request) -> tuple[float, int]:
        """Returns the seconds to a request's first token, and the number of its cached prompt tokens."""
        seconds, _, cached = self.seen.first_tokens([request])
        return seconds, cached

    def _first_row(self, name: str, length: int, times: list[tuple[float, int]]) -> Row:
        # The first run of a shape may have to wait for the device to wake up.
        seconds = [one for one, _ in times[1:] or times]
        return {
            "request": name,
            "prompt_tokens": length,
            "cached_tokens": times[-1][1],
            "ttft_ms": statistics.median(seconds) * 1e3,
            "spread_ms": (max(seconds) - min(seconds)) * 1e3,
        }

    def throughput(self, bandwidth: float) -> Row:
        """Serves the whole workload at once."""
        return self._serve(self.workload, bandwidth)

    def loads(self, bandwidth: float) -> list[Row]:
        """Serves each of `LOADS` at once."""
        temperature = self.workload.temperature
        return [
            {"load": name} | self._serve(replace(load, temperature=temperature), bandwidth)
            for name, load in LOADS.items()
        ]

    def _serve(self, workload: Workload, bandwidth: float) -> Row:
        requests = workload.draw(self.config.vocab_size)
        steps = self.engine.steps
        self.seen.watch.reset()
        figures = figures_of(serve(self.engine, requests, [0.0] * len(requests)))
        steps = self.engine.steps - steps
        params = self.engine.runner.params
        floor = workload_floor(
            self.options.shape, requests, bandwidth, params, common=workload.common_tokens
        )
        flat = {
            f"{name}_{which}": number
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for which, number in (figures.as_dict().pop(name) or {}).items()
        }
        plain = {k: v for k, v in figures.as_dict().items() if not k.endswith("_ms")}
        return {
            "server": "jaxkv",
            **plain,
            "steps": steps,
            "floor_s": floor,
            "share_of_floor_percent": 100 * floor / figures.seconds,
            **{f"{k}_s": seconds for k, seconds in self.seen.watch.seconds.items()},
            "compiled_while_serving": self.engine.runner.programs.compiled_late,
            **flat,
        }


def workload_floor(
    shape: str, requests: Sequence[Request], bandwidth: float, params: Params, *, common: int = 0
) -> float:
    """Returns a lower bound of a workload's seconds: prompts at peak FLOP/s, then decode at peak read bandwidth.

    Decode reads the weights once per token of the longest output, and each token's keys and values once. If the
    device's peak FLOP/s is unknown, the prompts count as 0 s. The first `common` tokens, which all prompts have in
    common, count once as prompts, without the others' attention to them, and once for each token of the longest output.
    """
    config = SHAPES[shape]
    itemsize = jax.tree.leaves(params)[0].dtype.itemsize
    per_key = config.num_layers * 2 * config.kv_heads * config.head_dim * itemsize
    lengths = [(len(one.prompt), one.max_tokens) for one in requests]
    longest = max(output for _, output in lengths)
    keys = common * longest + sum(
        output * (prompt - common) + output * (output - 1) / 2 for prompt, output in lengths
    )
    weights = decode_bytes(config, params, Setting(0, 0, 0, 0), itemsize)
    read = (longest * weights + keys * per_key) / bandwidth
    computed = [prompt - (common if at else 0) for at, (prompt, _) in enumerate(lengths)]
    prompts = prompt_seconds(config, params, computed)
    return read + (prompts or 0.0)


def show(row: Row) -> None:
    """Prints a result on one line."""
    told = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    print("  ".join(told), flush=True)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the argument parser with the options that this benchmark and the peer's have in common."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--requests", type=int, default=256)
    made.add_argument("--prompt-tokens", type=_range, default=(100, 1024), help="least:most")
    made.add_argument("--output-tokens", type=_range, default=(100, 1024), help="least:most")
    made.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen parts."""
    age = process_seconds()
    made = parser("Times the engine with random weights.")
    made.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    made.add_argument("--max-sequences", type=int, default=256)
    made.add_argument("--token-budget", type=int, default=EngineConfig().token_budget)
    made.add_argument("--steps-per-launch", type=int, help="the engine chooses if not given")
    made.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    made.add_argument("--batch", type=_sizes, default=(1, 8, 64, 256), help="of steady decode")
    made.add_argument("--context", type=int, default=1024, help="prompt tokens of steady decode")
    made.add_argument("--steps", type=int, default=64, help="of steady decode")
    made.add_argument("--repeats", type=int, default=6, help="of first tokens")
    made.add_argument("--long-prompt", type=int, default=LONG_PROMPT, help="kept or not")
    made.add_argument("--lazy", action="store_true", help="compile when needed, for steady alone")
    made.add_argument(
        "--background", action="store_true", help="compile most programs while requests are served"
    )
    made.add_argument("--verbose", action="store_true", help="print each compiled program")
    options = made.parse_args(arguments)
    parts = options.parts.split(",")
    if options.lazy and options.background:
        made.error("--lazy compiles nothing before it is needed, and --background most of it")
    if options.verbose:
        logging.basicConfig(format="%(relativeCreated)d ms %(message)s")
        logging.getLogger("jaxkv.engine").setLevel(logging.DEBUG)
    refuse_profilers()
    bench = Bench(options, age)
    bandwidth = measure_read_bandwidth() if {"steady", "throughput", "loads"} & set(parts) else 0.0

    def record(part: str, rows: list[Row]) -> None:
        print(f"== {part}", flush=True)
        for row in rows:
            show(row)
        save_record(f"engine-{options.shape}-{part}", rows, folder=options.folder)

    measures: dict[str, Callable[[], list[Row]]] = {
        "startup": lambda: [bench.startup],
        "steady": lambda: [
            bench.seen.steady(batch, options.context, options.steps, bandwidth)
            for batch in options.batch
        ],
        "first-token": bench.first_tokens,
        "throughput": lambda: [bench.throughput(bandwidth)],
        "loads": lambda: bench.loads(bandwidth),
    }
    startup = f"startup-{bench.startup['kind']}" + "-in-background" * options.background
    # As in a server.
    with without_old_objects():
        for part in parts:
            record(startup if part == "startup" else part, measures[part]())


if __name__ == "__main__":
    main()
