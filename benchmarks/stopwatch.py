"""Host time of the parts of an engine's step, and the time of its programs without the engine."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.engine.engine import Engine
from jaxkv.programs.manifest import Program
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec

_QUEUED = 48
"""Runs of a program that are timed together."""


class Stopwatch:
    """Accumulates the host's seconds in chosen methods of an engine.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def watch(self, owner: object, method: str, label: str) -> None:
        """Times every call of a method from now on."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - passed through
            start = self._clock()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[label] += self._clock() - start
                self.calls[label] += 1

        self.seconds[label], self.calls[label] = 0.0, 0
        setattr(owner, method, timed)

    def reset(self) -> None:
        """Sets all times and counts to zero."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.calls = dict.fromkeys(self.calls, 0)


def watch_steps(engine: Engine) -> Stopwatch:
    """Returns a stopwatch of planning, packing, enqueueing, waiting, and collecting, which includes waiting."""
    watch, runner = Stopwatch(), engine.runner
    watch.watch(engine.scheduler, "plan", "plan")
    watch.watch(engine.sequence_runner.packer, "pack", "pack")
    watch.watch(runner, "run", "enqueue")
    watch.watch(runner, "read", "wait")
    watch.watch(engine, "_collect", "collect")
    return watch


def count_steps(engine: Engine) -> Counter[int]:
    """Returns a count of programs by their steps, which grows from now on with each that the engine sends."""
    sent: Counter[int] = Counter()
    runner = engine.sequence_runner
    send = runner.step

    def counted(shape: StepSpec, rows: Any) -> Any:  # noqa: ANN401 - passed through
        sent[shape.steps] += 1
        return send(shape, rows)

    setattr(runner, "step", counted)  # noqa: B010 - a method
    return sent


def queued_seconds(runner: ModelRunner, program: Program, arrays: Sequence[np.ndarray]) -> float:
    """Returns the seconds per run of a program that is enqueued repeatedly, without packing or reading.

    Args:
        runner: the runner, whose cache is updated in place.
        program: the program; it runs with the same arguments each time.
        arrays: its arguments besides parameters and cache.
    """
    there = jax.device_put([array for array in arrays if array.size])

    def run(count: int) -> float:
        start, out = time.perf_counter(), None
        for _ in range(count):
            out = runner.owner.run(lambda cache: program(runner.params, cache, *there))
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(_QUEUED // 8)
    return run(_QUEUED) / _QUEUED


def process_seconds() -> float:
    """Returns how long this process has been running."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return now - started / os.sysconf("SC_CLK_TCK")
