"""`jaxkv bench serve`: its options, and the files that it writes. Slow modules are imported in the functions."""

import argparse
import importlib.util
import json
import os
import resource
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv import __version__
from jaxkv.bench.workload_options import (
    add_plot_option,
    add_workload_options,
    rates_or_all_at_once,
    workload_of,
)
from jaxkv.options import SIZES, size
from jaxkv.terminal import Screen

if TYPE_CHECKING:
    from jaxkv.bench.client.measure import LoadTest, Run
    from jaxkv.bench.figures import Objectives

KEY_VARIABLE = "JAXKV_API_KEY"
URL_VARIABLE = "JAXKV_BASE_URL"
_USUAL_URL = "http://127.0.0.1:8000"
_PACKAGES = ("httptools", "msgspec", "uvloop")
_INTERRUPTED = 130


def add_serve[P: argparse.ArgumentParser](modes: "argparse._SubParsersAction[P]") -> None:
    """Adds the mode to the modes of `jaxkv bench`."""
    parser = modes.add_parser(
        "serve", help="requests to a server with OpenAI's API, whether jaxkv or another"
    )
    parser.epilog = SIZES
    _server_options(parser)
    add_workload_options(
        parser, requests="256, or the whole file", limit="the server", with_file=True
    )
    _load_options(parser)
    add_plot_option(parser)
    parser.add_argument(
        "--result-json",
        type=Path,
        metavar="FILE",
        help="write the figures with the field names of vLLM's benchmark, for several rates as a list (default: none)",
    )
    parser.set_defaults(run=_run)


def _server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help=f"address of the server (default: the variable {URL_VARIABLE}, or {_USUAL_URL})",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"sent as a bearer token; others can see it in a list of processes (default: the variable {KEY_VARIABLE})",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="name of the model (default: the only one of the server)"
    )
    parser.add_argument(
        "--endpoint",
        default="completions",
        metavar="NAME",
        help="completions or chat (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=size,
        metavar="N",
        help="send token ids below N, which have exact lengths, instead of texts; for completions of servers that take "
        "ids, such as jaxkv and vLLM (default: texts)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="most seconds of a request (default: %(default)g)",
    )


def _load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate",
        type=rates_or_all_at_once,
        default=(None,),
        metavar="R",
        help="requests per second, or several rates such as 1,2,4,8, one run each; inf is all at once (default: inf)",
    )
    parser.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="of arrivals: 1 is a Poisson process, below 1 they come in bursts, above 1 they are steadier "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=size,
        metavar="N",
        help="most requests at once; latencies do not count the wait for a place (default: no limit)",
    )
    parser.add_argument(
        "--warm-up",
        type=size,
        default=0,
        metavar="N",
        help="requests that are sent before and not measured (default: %(default)s)",
    )
    parser.add_argument(
        "--open-connections",
        type=size,
        default=0,
        metavar="N",
        help="connections that are opened before the first request, so that no latency holds their set-up; requests "
        "beyond them open their own (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate all output tokens, on servers that know this parameter, such as jaxkv and vLLM",
    )
    parser.add_argument(
        "--goodput",
        type=_objectives,
        metavar="MS",
        help="count requests that meet these objectives in milliseconds, such as ttft:200,tpot:20,e2el:5000 "
        "(default: none)",
    )


def _objectives(text: str) -> dict[str, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = {name: float(most) for name, most in pairs}
    except ValueError:
        found = {}
    if not found or not set(found) <= {"ttft", "tpot", "e2el"} or min(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"must be like ttft:200,tpot:20,e2el:5000, got {text!r}")
    return found


def _run(options: argparse.Namespace, screen: Screen) -> int:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"bench serve needs {', '.join(missing)}; run pip install 'jaxkv[serve]', which needs no GPU"
        )
    test = _asked(options)
    _check_files(options)
    import asyncio

    import uvloop

    from jaxkv.bench.client.measure import measure_server

    _allow_many_connections()
    runs: list[Run] = []

    def report(run: "Run") -> None:
        runs.append(run)
        print(json.dumps(run.as_dict(), allow_nan=False) if options.json else run, flush=True)

    whole = asyncio.run(
        measure_server(test, report=report, note=screen.note, status=screen.status),
        loop_factory=uvloop.new_event_loop,
    )
    if runs:
        _write_files(options, runs)
    return 0 if whole else _INTERRUPTED


def _asked(options: argparse.Namespace) -> "LoadTest":
    from jaxkv.bench.client.measure import LoadTest
    from jaxkv.config.checks import as_int

    workload, given = workload_of(options)
    if options.vocab_size is not None:
        as_int("--vocab-size", options.vocab_size, 1, 2**31 - 1)
        if options.data_file is not None:
            raise ValueError("--vocab-size draws prompts, and --data-file has them; give one")
    if options.max_concurrency is not None:
        as_int("--max-concurrency", options.max_concurrency, 1, 2**20)
    as_int("--warm-up", options.warm_up, 0, 2**20)
    as_int("--open-connections", options.open_connections, 0, 2**20)
    url = options.base_url or os.environ.get(URL_VARIABLE) or _USUAL_URL
    return LoadTest(
        base_url=url.rstrip("/"),
        api_key=options.api_key or os.environ.get(KEY_VARIABLE) or None,
        model=options.model,
        endpoint=options.endpoint,
        workload=workload,
        given=given,
        data_file=options.data_file,
        vocab_size=options.vocab_size,
        rates=options.rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        warm_up=options.warm_up,
        open_connections=options.open_connections,
        ignore_eos=options.ignore_eos,
        timeout=options.timeout,
        objectives=_named(options.goodput),
    )


def _named(objectives: dict[str, Any] | None) -> "Objectives | None":
    from jaxkv.bench.figures import Objectives

    return None if objectives is None else Objectives(**objectives)


def _check_files(options: argparse.Namespace) -> None:
    """Refuses files that cannot be written, before minutes of measuring."""
    from jaxkv.bench.plots.page import check_plot

    if options.plot is not None:
        check_plot(options.plot)
    if options.result_json is not None and not options.result_json.parent.is_dir():
        raise ValueError(f"the folder of {str(options.result_json)!r} does not exist; make it")


def _write_files(options: argparse.Namespace, runs: "list[Run]") -> None:
    if options.result_json is not None:
        from jaxkv.bench.client.result_json import result_json

        results = [result_json(run, version=__version__, date=datetime.now()) for run in runs]
        told = results[0] if len(options.rate) == 1 else results
        options.result_json.write_text(json.dumps(told, allow_nan=False) + "\n", encoding="utf-8")
    if options.plot is not None:
        from jaxkv.bench.plots.page import write_plot
        from jaxkv.bench.plots.runs import PlottedRun

        plotted = [
            PlottedRun(
                summary=str(run), rate=run.rate, figures=run.figures, timelines=run.timelines
            )
            for run in runs
        ]
        write_plot(options.plot, f"jaxkv bench serve: {runs[0].about['model']}", plotted)


def _allow_many_connections() -> None:
    """Raises this process's limit of open files, which many systems set to 1024, to what it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
