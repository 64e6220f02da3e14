"""The options of `jaxkv bench`. Slow modules are imported in the functions, so that error messages appear at once."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

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


def add_bench[P: argparse.ArgumentParser](commands: "argparse._SubParsersAction[P]") -> None:
    """Adds the command to a parser's sub-commands."""
    bench = commands.add_parser("bench", help="measure throughput, latency or start-up")
    modes = bench.add_subparsers(
        title="what to measure", required=True, metavar="MODE", dest="mode"
    )
    for name, what in _MODES.items():
        mode = modes.add_parser(name, help=what)
        _served_options(mode)
        _workload_options(mode)
        if name == "latency":
            mode.add_argument(
                "--rate", type=_rate, required=True, metavar="R", help="requests per second"
            )
        mode.set_defaults(run=_run)


def _served_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, max_sequences=None)
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights of this shape: qwen3-0.6b, llama-3.1-8b or tiny (default: none, but --model)",
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


def _workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        default="random",
        metavar="NAME",
        help="random, or shared-prefix for prompts that begin alike (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=size,
        metavar="N",
        help=f"how many (default: 256, on a CPU {_REQUESTS_ON_CPU})",
    )
    for name in ("--prompt-tokens", "--output-tokens"):
        parser.add_argument(
            name,
            type=_range,
            metavar="A:B",
            help="least and most of a request, or one number for both (default: 100:1024, clipped to what the model "
            "supports)",
        )
    parser.add_argument(
        "--prefix-tokens",
        type=size,
        default=64,
        metavar="N",
        help="that prompts of shared-prefix have in common (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 is greedy (default: %(default)g)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of prompts and arrivals (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _range(text: str) -> tuple[int, int]:
    """Reads "100:1024" or "100:1k", or one number for both."""
    least, _, most = text.partition(":")
    try:
        return size(least), size(most or least)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be A:B or one number, got {text!r}") from None


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"the request rate must be above 0, got {text}")
    return rate


def _run(options: argparse.Namespace, screen: Screen) -> int:
    began = time.perf_counter()
    workload, served = _asked(options, screen)
    from jaxkv.bench.modes import measure_serving, measure_startup

    progress = sys.stderr.isatty()
    measures: dict[str, Callable[[], Result]] = {
        "throughput": lambda: measure_serving(served, workload, progress=progress),
        "latency": lambda: measure_serving(served, workload, rate=options.rate, progress=progress),
        "startup": lambda: measure_startup(served, workload, began=began, progress=progress),
    }
    result = measures[options.mode]()
    print(json.dumps(result.as_dict(), allow_nan=False) if options.json else result)
    return 0


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
    from jaxkv.bench.workload import LENGTHS, Workload

    sizes = {name: getattr(options, name) for name in ("requests", *LENGTHS)}
    given = {name: value for name, value in sizes.items() if value is not None}
    workload = Workload(
        data=options.data,
        prefix_tokens=options.prefix_tokens,
        temperature=options.temperature,
        seed=options.seed,
        **given,
    )
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
