"""The options of `jaxkv bench`. What measures is imported when it is asked for, so that mistakes answer at once."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxkv.config import CacheConfig

if TYPE_CHECKING:
    from jaxkv.bench.modes import Result
    from jaxkv.bench.serving import Served
    from jaxkv.bench.workload import Workload

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
            mode.add_argument("--rate", type=float, required=True, help="requests per second")
        mode.set_defaults(run=_run)


def _served_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", metavar="NAME", help="random weights: qwen3-0.6b or llama-3.1-8b"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face model directory; the small model if not given"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--cache-dtype", default="auto", help="of keys and values, also fp8, int8")
    parser.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens per page")
    parser.add_argument(
        "--max-sequences", type=int, default=256, metavar="N", help="sequences in flight at once"
    )
    parser.add_argument(
        "--cache-bytes", type=int, metavar="N", help="memory for the cache; a share of what is free"
    )
    parser.add_argument(
        "--token-budget", type=int, default=2048, metavar="N", help="most tokens of a step"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="keep no pages for others")
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help="mosaic_gpu, xla, cudnn or xla_products; the best that can run",
    )


def _workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="random", help="random or shared-prefix")
    parser.add_argument("--requests", type=int, default=256, metavar="N")
    parser.add_argument(
        "--prompt-tokens", type=_range, default=(100, 1024), metavar="A:B", help="least and most"
    )
    parser.add_argument(
        "--output-tokens", type=_range, default=(100, 1024), metavar="A:B", help="least and most"
    )
    parser.add_argument(
        "--prefix-tokens", type=int, default=64, metavar="N", help="that shared-prefix shares"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and arrivals")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _range(text: str) -> tuple[int, int]:
    """Reads "100:1024", or one number for both."""
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be A:B or one number, got {text!r}") from None


def _run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    workload, served = _asked(options)
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


def _asked(options: argparse.Namespace) -> "tuple[Workload, Served]":
    cache = CacheConfig(
        page_size=options.page_size,
        dtype=options.cache_dtype,
        max_sequences=options.max_sequences,
        budget_bytes=options.cache_bytes,
    )
    from jaxkv.bench.workload import Workload

    workload = Workload(
        data=options.data,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        prefix_tokens=options.prefix_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    from jaxkv.bench.serving import Served
    from jaxkv.engine.engine_config import EngineConfig

    return workload, Served(
        shape=options.shape,
        model=options.model,
        dtype=options.dtype,
        max_model_len=workload.longest,
        cache=cache,
        engine=EngineConfig(
            token_budget=options.token_budget, prefix_cache=not options.no_prefix_cache
        ),
        implementation=options.implementation,
    )
