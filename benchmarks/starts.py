"""Times the start of an `LLM` until its first token: cold, with the store of programs, and with a bundle of programs.

    python -m benchmarks.starts --model Qwen/Qwen3-0.6B --load-format dummy
    python -m benchmarks.starts                                               # the small model in the package

Each start is a process of its own, with a folder of caches that only these starts have. "cold" traces and compiles the
programs of a warm-up, and saves them as a bundle; "store" finds them in the store of compiled programs, for which it
traces them; "bundle" loads them (`LLM(programs=...)`). Seconds count from the first import of jaxkv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render

STARTS = ("cold", "store", "bundle")


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Starts one way in this process; returns the seconds of its parts."""
    began = time.perf_counter()
    from jaxkv import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    given = {"programs": options.bundle} if options.start == "bundle" else {}
    with LLM(
        options.model,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        max_num_seqs=options.rows,
        progress=False,
        **given,
    ) as llm:
        made = time.perf_counter()
        programs = len(llm.engine.runner.programs.manifest())
        if options.start != "bundle":
            half = options.max_model_len // 2
            found = llm.warm_up(batch=options.rows, prompt_tokens=half, sampling=greedy)
            programs = found.programs
        ready = time.perf_counter()
        llm.generate([[1, 2, 3]], greedy)
        ended = time.perf_counter()
        late = llm.stats().compiled_late
        if options.start == "cold":
            llm.save_programs(options.bundle)
    return {
        "start": options.start,
        "programs": programs,
        "load_s": made - began,
        "programs_s": ready - made,
        "first_token_s": ended - began,
        "compiled_late": late,
    }


def started(which: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the row of one way to start, in a process of its own.

    Raises:
        RuntimeError: the process failed; the message has the end of its errors.
    """
    environment = {**os.environ, "JAXKV_COMPILE_CACHE": str(folder / "store")}
    if which == "bundle":
        environment["JAXKV_COMPILE_CACHE"] = "off"
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    given = [
        *("--start", which, "--bundle", str(folder / "bundle")),
        *("--load-format", options.load_format, "--rows", str(options.rows)),
        *("--max-model-len", str(options.max_model_len)),
        *([] if options.model is None else ["--model", options.model]),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.starts", *given],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the start {which!r} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all starts and writes the record `starts-MODEL`, or runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="a model directory or a name on the hub")
    parser.add_argument("--load-format", default="auto", help="dummy draws random weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--name", default="default-model", help="end of the record's name")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--bundle", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.start is not None:
        print(json.dumps(start(options)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [started(which, options, Path(folder)) for which in STARTS]
    path = save_record(f"starts-{options.name}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
