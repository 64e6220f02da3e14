"""Two GPUs as one engine in one process and in two, and as two replicas: tokens, time per step, and a death.

    python3 -m benchmarks.several_processes [--model DIR] [--tokens 128] [--requests 8]

Each arrangement runs in processes of its own, so that none takes the memory of another. Prints one JSON line each. On a
machine without GPUs the processes have CPUs, which shows that the arrangements work and nothing about speed.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.replicas.devices import visible_gpus

ARRANGEMENTS = ("one_gpu", "one_process", "two_processes", "two_replicas")
PROMPT = "def area(width, height):\n    return "
_LONGEST_SECONDS = 600
_KILL_SECONDS = 3.0
_GONE_SECONDS = 60


def main() -> int:
    """Runs all arrangements, or one of their processes; returns 0 if all gave tokens and all ended after a death."""
    options = _parser().parse_args()
    if options.run is not None:
        run(options)
        return 0
    wanted: list[list[int]] | None = None
    works = True
    for name in ARRANGEMENTS:
        report = _report(options, name)
        wanted = wanted or report.get("tokens")
        report["tokens_of_one_gpu"] = report.pop("tokens", None) == wanted
        works = works and "seconds" in report
        print(json.dumps(report), flush=True)
    report = _death(options)
    print(json.dumps(report), flush=True)
    return 0 if works and report["ended"] else 1


def run(options: argparse.Namespace) -> None:
    """Runs one process of an arrangement, and prints what it measured if it has the requests."""
    import jax

    from jaxkv import LLM, SamplingParams

    shared: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": options.requests}
    if options.run == "two_processes":
        jax.distributed.initialize(f"127.0.0.1:{options.port}", 2, options.process)
    if options.run in ("one_process", "two_processes"):
        shared["tensor_parallel_size"] = 2
    if options.run == "two_replicas":
        shared["data_parallel_size"] = 2
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [f"{PROMPT}{number}" for number in range(options.requests)]
    with LLM(options.model, progress=False, **shared) as llm:
        if options.process:
            llm.follow()
            return
        llm.generate(prompts, sampling)
        if options.endless:
            print(json.dumps({"ready": True}), flush=True)
            while True:
                llm.generate(prompts, sampling)
        before, began = llm.stats().steps, time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - began
        stats = llm.stats()
        report = {
            "device": stats.device,
            "implementation": stats.implementation,
            "seconds": round(seconds, 4),
            "milliseconds_per_step": round(1e3 * seconds / max(1, stats.steps - before), 3),
            "tokens": [output.token_ids for output in outputs],
        }
        print(json.dumps(report), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model directory (default: the one in the package)")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--run", choices=ARRANGEMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--endless", action="store_true", help=argparse.SUPPRESS)
    return parser


def _report(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns what an arrangement has measured; the end of its errors if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        processes = _start(options, name, Path(folder))
        codes = _codes(processes, _LONGEST_SECONDS)
        report: dict[str, Any] = {"arrangement": name, "exit_codes": codes}
        return report | (_said(Path(folder)) or {"errors": _errors(Path(folder))})


def _death(options: argparse.Namespace) -> dict[str, Any]:
    """Kills the follower of two processes at work; returns how long the leader took to end, and its last words."""
    with tempfile.TemporaryDirectory() as folder:
        leader, follower = _start(options, "two_processes", Path(folder), "--endless")
        latest = time.monotonic() + _LONGEST_SECONDS
        while not _said(Path(folder)) and leader.poll() is None and time.monotonic() < latest:
            time.sleep(0.1)
        time.sleep(_KILL_SECONDS)
        follower.send_signal(signal.SIGKILL)
        began = time.monotonic()
        [code] = _codes([leader], _GONE_SECONDS)
        return {
            "arrangement": "two_processes, one killed",
            "ended": code is not None and code != 0,
            "seconds": round(time.monotonic() - began, 2),
            "words": _errors(Path(folder)),
        }


def _start(
    options: argparse.Namespace, name: str, folder: Path, *more: str
) -> list["subprocess.Popen[bytes]"]:
    """Starts the processes of an arrangement, whose outputs go to files of a folder."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    gpus = visible_gpus(os.environ)
    started = []
    for number in range(2 if name == "two_processes" else 1):
        given = ["--run", name, "--port", str(port), "--process", str(number), *more]
        given += ["--tokens", str(options.tokens), "--requests", str(options.requests)]
        given += [] if options.model is None else ["--model", options.model]
        with (folder / f"out{number}").open("w") as out, (folder / f"err{number}").open("w") as err:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.several_processes", *given],
                    stdout=out,
                    stderr=err,
                    env={**os.environ, **_devices_of(name, number, gpus)},
                )
            )
    return started


def _devices_of(name: str, number: int, gpus: Any) -> Mapping[str, str]:  # noqa: ANN401 - see `visible_gpus`
    """Returns the variables with which a process of an arrangement sees its devices."""
    if gpus is None:
        return {"JAX_NUM_CPU_DEVICES": "2" if name == "one_process" else "1"}
    if len(gpus) < 2:
        raise SystemExit(f"two GPUs are needed, and {len(gpus)} are visible here")
    own = {"one_gpu": gpus[:1], "two_processes": gpus[number : number + 1]}.get(name, gpus[:2])
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _codes(processes: list["subprocess.Popen[bytes]"], seconds: float) -> list[int | None]:
    """Waits for processes; returns their exit codes, `None` for one that had to be killed."""
    codes: list[int | None] = []
    latest = time.monotonic() + seconds
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, latest - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(None)
    return codes


def _said(folder: Path) -> dict[str, Any] | None:
    """Returns the JSON that the first process has printed."""
    lines = (folder / "out0").read_text().splitlines()
    return next((json.loads(line) for line in lines if line.startswith("{")), None)


def _errors(folder: Path) -> str:
    """Returns the last lines that the first process wrote to stderr."""
    return "\n".join((folder / "err0").read_text().splitlines()[-4:])[-1000:]


if __name__ == "__main__":
    sys.exit(main())
