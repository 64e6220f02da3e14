"""Times an op over its cases, next to its peers (`peers.py`) on the same work.

    python -m benchmarks.ops paged_attention ragged_attention page_write rotary_write
    python -m benchmarks.ops ragged_attention --case llama-1x8192 --implementation xla

An implementation is timed only after its result on the same case was compared with the reference's.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# The torch peers need memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks.peers import PEERS, NoPeer
from benchmarks.record import RECORDS, device_name, save_record
from benchmarks.timing import (
    CEILINGS,
    ROTATION_BYTES,
    Effort,
    Timing,
    refuse_profilers,
    time_chain,
)
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.workbench.op_benchmark import (
    OPS,
    BenchInputs,
    WrongResult,
    implementations,
    load_cases,
    prepare,
)

# Implementations that call third-party kernels.
_OTHERS = ("cudnn",)
_LAUNCH_US = 3000.0
_MOST_CALLS = 512


def time_implementation(bench: BenchInputs, implementation: str, effort: Effort) -> Timing:
    """Times one implementation of the op.

    Raises:
        Unsupported: the implementation does not support this case on this device.
        WrongResult: its result differs from the reference's.
    """
    return time_chain(bench.chain(bench.call(implementation)), effort)


def measure(
    op: str,
    case: Any,  # noqa: ANN401 - each op has its own Case
    *,
    dtype: str,
    chosen: Sequence[str],
    seconds: float = 0.05,
) -> list[dict[str, Any]]:
    """Returns rows with the times of the chosen implementations and all peers on one case, or why there is no time.

    "memory_mib" is the memory of all calls of one launch. For the smallest cases it fits into the L2 cache, so their
    times are those of a warm cache.
    """
    on_gpu = jax.default_backend() == "gpu"
    ceilings = CEILINGS.get(device_name())
    bench = prepare(op, case, dtype, ROTATION_BYTES if on_gpu else 0)
    num_bytes, flops = case.bytes_moved(dtype), case.flops()
    # What is multiplied may be narrower than the rest of a call.
    multiplied = getattr(case, "queries", None) or dtype
    floor = None if ceilings is None else ceilings.floor_us(num_bytes, flops, multiplied)
    # Enough work per launch to hide what sending it costs the host.
    calls = min(_MOST_CALLS, math.ceil(_LAUNCH_US / max(floor, 1.0))) if floor else 1
    effort = Effort(rounds=math.ceil(calls / len(bench.own)), seconds=seconds)
    times: dict[str, Callable[[], Timing]] = {
        name: partial(time_implementation, bench, name, effort) for name in chosen
    }
    times |= {name: partial(time_peer, bench, effort) for name, time_peer in PEERS.items()}
    arrays = jax.tree.leaves((bench.shared, bench.own))
    memory = {"memory_mib": sum(array.nbytes for array in arrays) / 2**20}
    rows = []
    for name, time_it in times.items():
        row = {"op": op, "case": case.name, "dtype": dtype, "implementation": name}
        try:
            timing, refused = time_it(), None
        except (Unsupported, NoPeer) as reason:
            timing, refused = None, str(reason)
        except WrongResult as reason:
            timing, refused = None, f"WRONG: {reason}"
        numbers = _numbers(timing, num_bytes, flops, floor)
        is_peer = name in PEERS or name in _OTHERS
        rows.append(row | {"is_peer": is_peer} | numbers | memory | {"refused": refused})
    return _with_ratios(rows)


def _numbers(
    timing: Timing | None, num_bytes: int, flops: int, floor: float | None
) -> dict[str, Any]:
    us = None if timing is None else timing.us
    return {
        "us": us,
        "spread": None if timing is None else timing.spread,
        "gb_per_s": None if us is None else num_bytes / us / 1e3,
        "tflop_per_s": None if us is None else flops / us / 1e6,
        "floor_us": floor,
        "share_of_ceiling": None if us is None or floor is None else floor / us,
        "host_bound": None if timing is None else timing.host_bound,
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row the ratio of its time to the fastest peer's."""
    peers = [row for row in rows if row["is_peer"] and row["us"] is not None]
    best = min(peers, key=lambda row: row["us"], default=None)
    for row in rows:
        row["peer"] = row["ratio_to_peer"] = None
        if best is not None and row["us"] is not None:
            row["peer"] = best["implementation"]
            row["ratio_to_peer"] = row["us"] / best["us"]
    return rows


def _line(row: dict[str, Any]) -> str:
    name = f"{row['case']:34s} {row['implementation']:12s}"
    if row["us"] is None:
        return f"{name} not timed: {row['refused']}"
    share = f"{row['share_of_ceiling']:4.0%}" if row["share_of_ceiling"] else "  - "
    ratio = f"{row['ratio_to_peer']:5.2f} x {row['peer']}" if row["peer"] else "no peer"
    bound = "  HOST-BOUND" if row["host_bound"] else ""
    return (
        f"{name} {row['us']:9.1f} us  +-{row['spread']:4.0%}  {row['gb_per_s']:6.0f} GB/s "
        f"{row['tflop_per_s']:6.1f} TFLOP/s  {share} of ceiling  {ratio}{bound}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times ops over their cases.")
    parser.add_argument("ops", nargs="+", choices=OPS, metavar="op", help=", ".join(OPS))
    parser.add_argument(
        "--case", action="append", help="a case by name; all real shapes if not given"
    )
    parser.add_argument("--implementation", action="append", help="all that can run if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seconds", type=float, default=0.05, help="least duration of a trial")
    parser.add_argument(
        "--record", help="name of the record; ops-OP if every real shape ran on a GPU, else none"
    )
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where to save the record")
    options = parser.parse_args(arguments)
    if len(options.ops) > 1 and (options.case or options.implementation or options.record):
        parser.error("cases, implementations and a record's name are those of one op")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and saves; returns 1 if the result of an implementation or a peer is wrong."""
    options = _parse(arguments)
    refuse_profilers()
    if jax.default_backend() != "gpu":
        print(f"no GPU: timing on {device_name()}; these times do not predict those on a GPU")
    if CEILINGS.get(device_name()) is None:
        print(f"no ceilings are known for {device_name()}, so no shares are given")
    rows = [row for op in options.ops for row in _run(op, options)]
    return int(any((row["refused"] or "").startswith("WRONG") for row in rows))


def _run(op: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one op, and saves after each case, so that an interrupted run leaves a record."""
    on_gpu = jax.default_backend() == "gpu"
    cases = load_cases(op)
    names = options.case or [name for name, case in cases.items() if case.ci != on_gpu]
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise SystemExit(f"{op} has no case {unknown[0]!r}; choose from {', '.join(cases)}")
    chosen = options.implementation or implementations(op)
    complete = on_gpu and not options.case and not options.implementation
    record = options.record or (f"ops-{op}" if complete else None)
    rows, saved = [], None
    for name in names:
        measured = measure(
            op, cases[name], dtype=options.dtype, chosen=chosen, seconds=options.seconds
        )
        rows += measured
        print(*map(_line, measured), sep="\n", flush=True)
        saved = save_record(record, rows, folder=options.folder) if record else None
    if saved:
        print(f"recorded in {saved}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
