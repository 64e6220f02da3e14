"""GPU busy time and time per kernel of a function, from the traces of JAX's profiler.

Under the profiler XLA launches kernels one by one instead of as a CUDA graph, so gaps between them are meaningless.
"""

import gzip
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxkv.programs.hlo import Instruction, parse_module

Event = Mapping[str, Any]
Row = dict[str, Any]

_LONGEST_NAME = 60


def record_events(run: Callable[[], object]) -> list[Event]:
    """Runs a function under the profiler and returns the recorded events, in Chrome's trace format."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [path] = Path(folder).rglob("*.trace.json.gz")
        return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def covered(events: Sequence[Event]) -> float:
    """Returns the seconds covered by events on GPU streams; overlapping events count once."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in on_streams(events))
    total, until = 0.0, -math.inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total / 1e6


def on_streams(events: Sequence[Event]) -> list[Event]:
    """Returns the events that ran on a stream of a GPU."""
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"].get("name", "")
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    processes = {
        pid for (kind, pid, _), name in names.items() if "GPU" in name and kind == "process_name"
    }
    streams = {
        (pid, thread)
        for (kind, pid, thread), name in names.items()
        if kind == "thread_name" and pid in processes and "Stream" in name
    }
    return [
        event
        for event in events
        if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams
    ]


def by_kernel(events: Sequence[Event], steps: int, hlo: str = "", most: int = 24) -> list[Row]:
    """Returns a row per kernel and largest operand, in descending order of time, and one row for all others.

    Args:
        events: the events of `steps` steps.
        steps: number of steps, by which times and launches are divided.
        hlo: text of the optimised program that ran most, for the operands; the operand of an instruction that is not in
            it is `None`.
        most: most rows before the row of all others.
    """
    largest = _largest_operands(hlo) if hlo else {}
    found: dict[tuple[str, str | None], list[float]] = {}
    for event in on_streams(events):
        instruction = event.get("args", {}).get("hlo_op")
        # XLA numbers its fusions; those of one kind in all layers are one row.
        name = re.sub(r"([._]\d+)+$", "", event["name"])[:_LONGEST_NAME]
        found.setdefault((name, largest.get(instruction)), []).append(event["dur"])
    total = sum(map(sum, found.values()))
    ordered = sorted(found.items(), key=lambda entry: -sum(entry[1]))
    rest = [duration for _, durations in ordered[most:] for duration in durations]
    named = [*ordered[:most], *([(("the rest", None), rest)] if rest else [])]
    return [
        {
            "kernel": name,
            "largest_operand": operand,
            "launches_per_step": len(durations) / steps,
            "us_per_step": sum(durations) / steps,
            "share_percent": 100 * sum(durations) / total,
        }
        for (name, operand), durations in named
    ]


def _largest_operands(hlo: str) -> dict[str, str]:
    """Returns instruction -> its largest operand, such as "bf16[28672,4096]"."""
    told = {}
    for instructions in parse_module(hlo).computations.values():
        by_name = {one.name: one for one in instructions}
        for one in instructions:
            if arrays := _arrays(one, by_name):
                array = max(arrays, key=lambda array: array.elements)
                told[one.name] = f"{array.dtype}[{','.join(map(str, array.sizes))}]"
    return told


def _arrays(instruction: Instruction, by_name: Mapping[str, Instruction]) -> list[Any]:
    known = (by_name[name] for name in instruction.operands if name in by_name)
    return [array for operand in known for array in operand.results]
