"""Runs each op's kernel on small edge cases under NVIDIA's compute-sanitizer and summarises the findings.

    python -m pallas_kernels.workbench.sanitize
    python -m pallas_kernels.workbench.sanitize paged_attention --tool memcheck

memcheck finds accesses outside of an allocation; initcheck finds reads of memory that was never written. The runs use
XLA's "platform" allocator, so that each array is its own allocation. Findings in XLA's kernels count as well, because
memory that one of our kernels left unwritten is reported where XLA reads it.

initcheck does not track stores by TMA. It therefore reports the first reader of a result that a kernel stores by TMA
(ragged_attention, ssd_scan). The contract tests check that such results are complete.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

OPS = (
    "paged_attention",
    "ragged_attention",
    "latent_attention",
    "page_write",
    "rotary_write",
    "skinny_matmul",
    "causal_conv",
    "ssd_scan",
    "ssd_update",
    "delta_scan",
    "delta_update",
    "index_topk",
    "filter_bounds",
)
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
KERNEL = "mosaic_gpu"

_SECONDS = 600
_TOTAL = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_KERNEL = re.compile(r"^=+ +at (?P<name>[^\s(+]+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one tool on one op.

    Attributes:
        op: the op's name.
        tool: the tool's name.
        cases: number of cases that ran.
        findings: number of errors that the tool counted.
        kernels: names of the kernels in the tool's reports.
        broken: the last lines of output if the run failed; empty otherwise.
    """

    op: str
    tool: str
    cases: int
    findings: int
    kernels: tuple[str, ...] = ()
    broken: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether at least one case ran, the run completed, and the tool counted no error."""
        return self.cases > 0 and not self.findings and not self.broken


def find_tool() -> str | None:
    """Returns the path of compute-sanitizer, from the PATH or from /usr/local/cuda*/bin; `None` if not installed."""
    folders = sorted(Path("/usr/local").glob("cuda*/bin"))
    return shutil.which("compute-sanitizer") or next(
        (found for folder in folders if (found := shutil.which("compute-sanitizer", path=folder))),
        None,
    )


def watch(program: str, op: str, tool: str) -> Outcome:
    """Runs an op's cases under a tool, in a separate process."""
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=",
    }
    command = [program, "--tool", tool, "--print-limit", "1000", sys.executable]
    command += ["-m", "pallas_kernels.workbench.sanitize", "--run", op]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Outcome(op, tool, 0, 0, broken=f"it took longer than {_SECONDS} s")
    return read_outcome(op, tool, done.stdout + done.stderr, done.returncode)


def read_outcome(op: str, tool: str, text: str, status: int = 0) -> Outcome:
    """Parses the output of a tool and of the cases that ran under it."""
    total = _TOTAL.search(text)
    whole = total is not None and status == 0 and "ran all cases" in text
    return Outcome(
        op,
        tool,
        cases=text.count(f"case of {op}: "),
        findings=int(total[1]) if total else 0,
        kernels=tuple(dict.fromkeys(_KERNEL.findall(text))),
        broken="" if whole else " / ".join(text.strip().splitlines()[-4:]),
    )


def hostile(case: Any) -> Iterator[Any]:  # noqa: ANN401 - each op has its own Case
    """Yields the case unchanged, then with sizes that the kernels support."""
    yield case
    known = {field.name for field in fields(case)}
    pages = {"head_dim": 64, "heads": 8, "kv_heads": 2, "half": 32}
    pages |= {"value_dim": 128, "rope_dim": 64}
    states = {"groups": 2, "d_state": 128, "chunk_size": 64}
    sizes: Mapping[str, Any] = pages | states
    able = {name: value for name, value in sizes.items() if name in known}
    if "page_size" not in known:
        yield replace(case, **able)
        return
    # A write case names slots, so its page size must not change.
    for page_size in (16, 64) if "table_width" in known else (case.page_size,):
        yield replace(case, **able, page_size=page_size)


def run_cases(op: str) -> None:
    """Runs the kernel on each small case that it supports, one by one: memcheck crashes with parallel compilation."""
    import jax

    from pallas_kernels.workbench.op_benchmark import load_cases

    for small in load_cases(op).values():
        found = _first_that_runs(op, small) if small.ci else None
        if found is not None:
            case, run = found
            jax.block_until_ready(run())
            print(f"case of {op}: {case}"[:200], flush=True)
    print("ran all cases", flush=True)


def _first_that_runs(op: str, small: Any) -> tuple[Any, Callable[[], Any]] | None:  # noqa: ANN401
    """Returns the first of `hostile(small)` that the kernel supports, and its compiled call; `None` if none."""
    import jax
    import numpy as np

    import pallas_kernels
    from pallas_kernels.dispatch import Unsupported

    for case in hostile(small):
        inputs = case.inputs(seed=1, dtype="bfloat16")
        options = {
            name: value
            for name, value in inputs.items()
            if not isinstance(value[0] if isinstance(value, tuple) else value, np.ndarray)
        }
        call = partial(getattr(pallas_kernels, op), **options, implementation=KERNEL)
        arrays = {name: value for name, value in inputs.items() if name not in options}
        arrays = {name: jax.tree.map(jax.numpy.asarray, value) for name, value in arrays.items()}
        try:
            return case, partial(jax.jit(call).lower(**arrays).compile(), **arrays)
        except Unsupported:
            continue
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools on the ops in parallel; returns 0 if all are clean, 1 if not, 2 without compute-sanitizer."""
    parser = argparse.ArgumentParser(
        description="Runs the kernels under NVIDIA's compute-sanitizer."
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=", ".join(OPS))
    parser.add_argument(
        "--tool", action="append", choices=TOOLS, help="default: memcheck and initcheck"
    )
    parser.add_argument("--run", choices=OPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run_cases(options.run)
        return 0
    program = find_tool()
    if program is None:
        print("compute-sanitizer is not installed; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    wanted = [(op, tool) for op in options.ops or OPS for tool in options.tool or TOOLS[:2]]
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(len(wanted)) as threads:
        for outcome in threads.map(lambda pair: watch(program, *pair), wanted):
            verdict = "clean" if outcome.is_clean else "NOT CLEAN"
            print(
                f"{outcome.op:18s} {outcome.tool:10s} {outcome.cases:3d} cases  {outcome.findings} findings  "
                f"{verdict}  {', '.join(outcome.kernels)} {outcome.broken}",
                flush=True,
            )
            outcomes.append(outcome)
    return int(not all(outcome.is_clean for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
