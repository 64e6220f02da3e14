"""Builds one program: trace it, then load it from the store, or lower, compile and audit it.

Tracing and lowering are Python and run in the caller's thread. XLA compiles without holding Python's global lock, so
several programs compile in parallel.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.programs.audit import AuditReport, audit
from jaxkv.programs.fingerprint import devices_of, name_traced
from jaxkv.programs.jax_cache import MIN_COMPILE_SECONDS, without_entry
from jaxkv.programs.lowering import Lowering, argument_types, trace
from jaxkv.programs.spec import ProgramSpec
from jaxkv.programs.store import (
    UNSERIALISABLE,
    ProgramFile,
    StoredProgram,
    Structure,
    open_store,
)
from pallas_kernels.lowering import quick_lowering
from pallas_kernels.lowering_helpers import LoweringHelpers

_LOG = logging.getLogger(__name__)

# With this option on, XLA fuses slices of the packed array into kernels that command buffers cannot hold, which cuts a
# step of 64 rows into about 30 command buffers. Without it, a slice is one copy node for all layers.
_COMPILER_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}

# XLA's own kernels over peer memory take one array. Sums and extrema of several, which XLA would combine, go to NCCL.
_OPTIONS_OF_SEVERAL_DEVICES = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}

# From JAX 0.12 on an element's bits depended on its place in a loop on an x86 CPU: the first three of four equal rows
# differed from the last one. Without fused multiply-adds (`xla_cpu_max_isa=AVX`) or at this level they do not; LLVM
# seems to contract products and sums in vectorised loops and not in what is left of them.
_EQUAL_ROWS_ON_CPU = {"xla_backend_optimization_level": 1}

# Not "cpu": XLA may serialise a CPU program without some of its functions. CPU programs lower fast, and JAX's own cache
# stores them.
_STORED_PLATFORMS = ("gpu",)

_PLATFORMS = ("cuda",)
"""What JAX lowers stored programs for."""

_MOST_WORKERS = 16

TRACING_LOCK = threading.RLock()
"""Held by a thread while it traces or lowers a program, so that one that serves waits for at most one of these."""


@dataclass(frozen=True)
class Built:
    """A program that is ready to run.

    Attributes:
        compiled: the executable.
        report: the audit's report.
        seconds: time to build it, summed over all threads.
        host_seconds: the part of `seconds` in the thread that traced and lowered it.
        loaded: whether it was compiled by an earlier process.
    """

    compiled: jax.stages.Compiled
    report: AuditReport
    seconds: float
    host_seconds: float
    loaded: bool


class Build:
    """A program that is being built: traced when this is made, then lowered if it is not in the store, then compiled.

    Attributes:
        traced: the trace.
        is_stored: whether it is in the store of compiled programs.
        is_storable: whether the store could hold it.
    """

    def __init__(self, name: str, lowering: Lowering) -> None:
        """Traces the program and looks for it in the store.

        Raises:
            ProgramRefused: the program does not return its cache with the same shapes, or closes over weights.
            ValueError: the arguments are not typed arrays.
        """
        start = time.perf_counter()
        self._name, self._cache_argument = name, lowering.cache_argument
        devices = devices_of(argument_types(lowering))
        on_cpu = bool(devices) and devices[0].platform == "cpu"
        self._options = {
            **_COMPILER_OPTIONS,
            **(_OPTIONS_OF_SEVERAL_DEVICES if len(devices) != 1 else {}),
            **(_EQUAL_ROWS_ON_CPU if lowering.has_equal_rows and on_cpu else {}),
            **(lowering.compiler_options or {}),
        }
        self.traced = trace(name, lowering)
        self._file = _file_of(name, lowering, self.traced, self._options)
        self._lowered: jax.stages.Lowered | None = None
        self.is_storable = self._file is not None
        self.is_stored = self._file is not None and self._file.exists
        self._host_seconds = time.perf_counter() - start

    def request(self, helpers: LoweringHelpers) -> bool:
        """Lets processes start to lower the kernels of a program that the store could hold; returns whether some may.

        Its name in the store covers all that the kernels depend on, and these processes have the same.
        """
        if not self.is_storable or self.is_stored:
            return False
        return helpers.request(self.traced, _PLATFORMS)

    def is_ready(self, helpers: LoweringHelpers) -> bool:
        """Returns whether no process has still to lower some of its kernels."""
        return helpers.is_done(self.traced)

    def lower(self) -> None:
        """Lowers the program in this thread."""
        start = time.perf_counter()
        with quick_lowering():
            self._lowered = self.traced.lower()
        self._host_seconds += time.perf_counter() - start

    def finish(self) -> Built:
        """Loads or compiles the program, in any thread."""
        start, file, before = time.perf_counter(), self._file, self._host_seconds
        stored = None
        if file is not None and self._lowered is None and self.is_stored:
            stored = file.load(self.traced)
        loaded, hits = stored is not None, _EVENTS.hits_of_thread()
        if stored is None:
            if self._lowered is None:
                self.lower()
            assert self._lowered is not None
            with nullcontext() if file is None else without_entry():
                compiled = self._lowered.compile(compiler_options=self._options)
            stored = StoredProgram(compiled, audit(compiled, cache_argument=self._cache_argument))
            loaded = _EVENTS.hits_of_thread() > hits
        else:
            _EVENTS.compiles += 1
        seconds = before + time.perf_counter() - start
        if file is not None and not file.exists and seconds >= MIN_COMPILE_SECONDS:
            file.save(stored)
        source = "loaded" if loaded else "compiled"
        python = self._host_seconds
        _LOG.debug(
            "%s: %s in %.2f s, of which %.2f s in Python", self._name, source, seconds, python
        )
        return Built(stored.compiled, stored.report, seconds, python, loaded)


def most_workers() -> int:
    """Returns the number of threads in which XLA compiles programs."""
    return min(_MOST_WORKERS, os.cpu_count() or 1)


def ready_builds(
    missing: Iterable[tuple[ProgramSpec, Callable[[], Lowering]]],
    helpers: LoweringHelpers,
    *,
    failed: Callable[[ProgramSpec, Exception], None] | None = None,
) -> Iterator[tuple[ProgramSpec, Build]]:
    """Traces programs, lowers them, and yields each as soon as only XLA has work with it.

    Those whose kernels other processes lower come last, in the order in which these processes have them: this thread
    traces all programs meanwhile.

    Args:
        missing: each program's spec, and a function that returns what to compile.
        helpers: the other processes.
        failed: called with each program that cannot be traced or lowered, which is left out; `None` to raise instead.
            Others of which the kernels are ready then come between two traces, since they are used at once.
    """
    waiting: list[tuple[ProgramSpec, Build]] = []

    def lowered(spec: ProgramSpec, program: Build) -> Iterator[tuple[ProgramSpec, Build]]:
        try:
            # Not under the lock, which others wait for.
            helpers.collect(program.traced)
            with TRACING_LOCK:
                program.lower()
        except Exception as error:
            if failed is None:
                raise
            failed(spec, error)
        else:
            yield spec, program

    def first_ready() -> int | None:
        ready = (at for at, (_, program) in enumerate(waiting) if program.is_ready(helpers))
        return next(ready, None)

    for spec, build in missing:
        try:
            with TRACING_LOCK:
                program = Build(spec.name, build())
                is_asked_for = program.request(helpers)
        except Exception as error:
            if failed is None:
                raise
            failed(spec, error)
            continue
        if is_asked_for:
            waiting.append((spec, program))
        elif program.is_stored:
            yield spec, program
        else:
            yield from lowered(spec, program)
        if failed is not None and (at := first_ready()) is not None:
            yield from lowered(*waiting.pop(at))
    while waiting:
        yield from lowered(*waiting.pop(first_ready() or 0))
    helpers.end()


def load_build(file: ProgramFile, arguments: Structure, results: Structure) -> Built:
    """Returns the program in a file, without tracing it; see `ProgramFile.read`."""
    start = time.perf_counter()
    stored = file.read(arguments, results)
    _EVENTS.compiles += 1
    seconds = time.perf_counter() - start
    return Built(stored.compiled, stored.report, seconds, host_seconds=0.0, loaded=True)


def _file_of(
    name: str, lowering: Lowering, traced: jax.stages.Traced, options: Mapping[str, Any]
) -> ProgramFile | None:
    """Returns the program's file in the store, or `None` if there is no store or it cannot hold the program."""
    specs, store = argument_types(lowering), open_store()
    devices = devices_of(specs)
    if store is None or not devices or devices[0].platform not in _STORED_PLATFORMS:
        return None
    # Each of several processes has an executable of its own, and all of these would have the same name.
    if {device.process_index for device in devices} != {jax.process_index()}:
        return None
    try:
        named = name_traced(name, traced, specs, devices, options)
    except UNSERIALISABLE as error:
        # Without a description of the links between its devices, a program has no safe name.
        _LOG.warning("a program over %d devices is not stored: %r", len(devices), error)
        return None
    return store.file_of(named, devices)


class _Events:
    """Counts JAX's compilations and compilation-cache hits since the import of this module."""

    def __init__(self) -> None:
        self.compiles = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def hits_of_thread(self) -> int:
        """Returns the number of hits of JAX's compilation cache in this thread."""
        return getattr(self._thread, "hits", 0)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        self.compiles += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        self._thread.hits = self.hits_of_thread() + (event == "/jax/compilation_cache/cache_hits")


_EVENTS = _Events()


def compile_count() -> int:
    """Returns the number of programs that this process has compiled or loaded from disk."""
    return _EVENTS.compiles
