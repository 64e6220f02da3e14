"""The options of `jaxkv bench`. Slow modules are imported in the functions, so that error messages appear at once."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.bench.serve_command import add_serve
from jaxkv.bench.workload_options import (
    add_plot_option,
    add_workload_options,
    rates,
    workload_of,
)
from jaxkv.config.cache import CacheConfig
from jaxkv.options import add_model_options, size
from jaxkv.terminal import Screen

if TYPE_CHECKING:
    from jaxkv.bench.modes import Result
    from jaxkv.bench.serving import Served
    from jaxkv.bench.workload import Workload

_REQUESTS_ON_CPU = 16
_MOST_SEQUENCES = 256
_MODES = {
    "throughput": "all requests at once",
    "latency": "requests that come at random, at a rate",
    "startup": "how long an engine takes to get ready",
}
"""Modes that measure an engine in this process."""


def add_bench[P: argparse.ArgumentParser](commands: "argparse._SubParsersAction[P]") -> None:
    """Adds the command to a parser's sub-commands."""
    bench = commands.add_parser("bench", help="measure throughput, latency, start-up or a server")
    modes = bench.add_subparsers(
        title="what to measure", required=True, metavar="MODE", dest="mode"
    )
    for name, what in _MODES.items():
        mode = modes.add_parser(name, help=what)
        _served_options(mode)
        add_workload_options(mode, requests=f"256, on a CPU {_REQUESTS_ON_CPU}", limit="the model")
        if name == "latency":
            mode.add_argument(
                "--rate",
                type=rates,
                required=True,
                metavar="R",
                help="requests per second, or several rates such as 1,2,4,8, one run each",
            )
        if name != "startup":
            add_plot_option(mode)
        mode.set_defaults(run=_run)
    add_serve(modes)


def _served_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, max_sequences=None)
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights of this shape: qwen3-0.6b, llama-3.1-8b, llama-3.1-70b or tiny (default: none, but "
        "--model)",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy draws random weights; the directory then needs no more than a config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=size,
        metavar="N",
        help="longest prompt plus output in tokens (default: what the requests need)",
    )
    parser.add_argument(
        "--token-budget",
        type=size,
        default=2048,
        metavar="N",
        help="most tokens of a step (default: %(default)s)",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="share no cached prefixes")


def _run(options: argparse.Namespace, screen: Screen) -> int:
    began = time.perf_counter()
    plot = getattr(options, "plot", None)
    if plot is not None:
        from jaxkv.bench.plots.page import check_plot

        check_plot(plot)
    workload, served = _asked(options, screen)
    from jaxkv.bench.modes import measure_rates, measure_startup

    progress = sys.stderr.isatty()
    measures: dict[str, Callable[[], Iterable[Result]]] = {
        "throughput": lambda: measure_rates(served, workload, (None,), progress=progress),
        "latency": lambda: measure_rates(served, workload, options.rate, progress=progress),
        "startup": lambda: [measure_startup(served, workload, began=began, progress=progress)],
    }
    results = []
    for result in measures[options.mode]():
        results.append(result)
        if len(getattr(options, "rate", ())) > 1 and not options.json:
            print(f"{result.about['request_rate']:g} requests/s")
        print(json.dumps(result.as_dict(), allow_nan=False) if options.json else result, flush=True)
    if plot is not None:
        _plot(plot, options.mode, results)
    return 0


def _plot(path: Path, mode: str, results: "Sequence[Result]") -> None:
    from jaxkv.bench.figures import Figures
    from jaxkv.bench.plots.page import write_plot
    from jaxkv.bench.plots.runs import PlottedRun

    runs = []
    for result in results:
        assert isinstance(result.outcome, Figures), "modes with a plot serve requests"
        runs.append(
            PlottedRun(
                summary=str(result),
                rate=result.about["request_rate"],
                figures=result.outcome,
                timelines=result.timelines,
            )
        )
    write_plot(path, f"jaxkv bench {mode}: {results[0].about['model']}", runs)


def _asked(options: argparse.Namespace, screen: Screen) -> "tuple[Workload, Served]":
    """Returns the workload and the engine to measure; options that are not given are made to fit device and model.

    Raises:
        ValueError: the given lengths exceed the longest sequence.
    """
    rows = options.max_sequences
    cache = CacheConfig(
        page_size=options.page_size,
        dtype=options.cache_dtype,
        max_sequences=CacheConfig.max_sequences if rows is None else rows,
        budget_bytes=options.cache_bytes,
    )
    from jaxkv.bench.workload import LENGTHS

    workload, given = workload_of(options)
    screen.status("starting")
    import jax

    from jaxkv.bench.serving import Served
    from jaxkv.config.engine import EngineConfig
    from jaxkv.plan import resolve_length

    served = Served(
        shape=options.shape,
        model=options.model,
        revision=options.revision,
        dtype=options.dtype,
        max_model_len=workload.longest,
        cache=cache,
        engine=EngineConfig(
            token_budget=options.token_budget, prefix_cache=not options.no_prefix_cache
        ),
        implementation=options.implementation,
        ignore_config_keys=tuple(options.ignore_config_keys),
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
        load_format=options.load_format,
    )
    screen.status("")
    if options.requests is None and jax.default_backend() == "cpu":
        workload = replace(workload, requests=_REQUESTS_ON_CPU)
    most = resolve_length(options.max_model_len, served.max_positions)
    before = workload.longest
    workload = workload.clipped(most, *(name for name in LENGTHS if name not in given))
    prompt, output = workload.prompt_tokens[1], workload.output_tokens[1]
    if workload.longest > most:
        raise ValueError(
            f"prompts of up to {prompt:,} tokens and outputs of up to {output:,} exceed max_model_len, {most:,}; lower "
            "--prompt-tokens or --output-tokens, or take a model that supports more"
        )
    if workload.longest < before:
        screen.note(
            f"jaxkv: prompts have up to {prompt:,} tokens and outputs up to {output:,}, because max_model_len is "
            f"{most:,}; --prompt-tokens and --output-tokens change them"
        )
    if rows is None:
        cache = replace(cache, max_sequences=min(workload.requests, _MOST_SEQUENCES))
    length = workload.longest if options.max_model_len is None else most
    return workload, replace(served, max_model_len=length, cache=cache)
