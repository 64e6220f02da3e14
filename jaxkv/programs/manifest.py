"""`Program`, an ahead-of-time compiled program, and `Programs`, the manifest of all programs by spec.

A program takes arrays of fixed shapes, among them the cache, which it donates and returns first. Calling a program
never compiles, and compiling never runs one, so a warm-up does not change the cache.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxkv.errors import ProgramRefused
from jaxkv.memory import without_garbage_collection
from jaxkv.programs.background import BackgroundCompiler, Task, threads_have_settings
from jaxkv.programs.compile import (
    TRACING_LOCK,
    Build,
    Built,
    compile_count,
    most_workers,
    ready_builds,
)
from jaxkv.programs.jax_cache import repaired_entries
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from pallas_kernels.lowering_helpers import LoweringHelpers

__all__ = ["Lowering", "Program", "Programs", "compile_count", "compile_program"]

_LOG = logging.getLogger(__name__)


class Program:
    """One compiled program. Calling it donates its cache argument.

    Attributes:
        spec: the program's key.
        seconds: time to trace, lower and compile it, or to load it from disk.
        host_seconds: the part of `seconds` in the thread that traced and lowered it.
        loaded: whether an earlier process compiled it.
        report: the audit's report, with the program's memory in bytes.
        compiled: the executable.
    """

    def __init__(self, spec: ProgramSpec, built: Built) -> None:
        self.spec = spec
        self.report = built.report
        self.seconds = built.seconds
        self.host_seconds = built.host_seconds
        self.loaded = built.loaded
        self.compiled = built.compiled
        arguments = built.compiled.args_info[0]
        # Only arguments that are single arrays can come from the host; params and cache are on the device.
        self._lone = tuple(
            (position, argument.dtype)
            for position, argument in enumerate(arguments)
            if isinstance(argument, jax.stages.ArgInfo)
        )

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 - a program takes and returns any pytrees
        """Runs the program.

        Raises:
            ValueError: an array has another dtype than the program's, to which JAX would cast it silently.
        """
        for position, dtype in self._lone:
            # Built-in dtypes are single objects, so this decides nearly every call without comparing.
            if getattr(arguments[position], "dtype", None) is not dtype:
                self._check_dtype(position, dtype, arguments[position])
        return self.compiled(*arguments)

    def _check_dtype(self, position: int, dtype: np.dtype, argument: object) -> None:
        given = getattr(argument, "dtype", None)
        if given != dtype:
            got = given or type(argument).__name__
            raise ValueError(
                f"argument {position} of {self.spec} must be {dtype}, got {got}; convert it"
            )


class Programs:
    """The manifest: every program compiled so far, by spec.

    Args:
        strict: refuse to compile after `seal`.
        audit: refuse programs that do not update their cache in place.
    """

    def __init__(self, *, strict: bool = False, audit: bool = True) -> None:
        self.strict = strict
        self.audit = audit
        self.compiled_late = 0
        """Programs compiled since `seal`."""
        self._foreground_seconds = 0.0
        self._sealed = False
        self._programs: dict[ProgramSpec, Program] = {}
        self._callbacks: list[Callable[[str], None]] = []
        self._background = BackgroundCompiler(self._keep, self._programs.__contains__)

    @property
    def is_closed(self) -> bool:
        """Whether `get` refuses a program that is not in the manifest."""
        return self.strict and self._sealed

    @property
    def pending(self) -> int:
        """Number of programs that the background has not compiled yet."""
        return len(self._background)

    @property
    def compile_seconds(self) -> float:
        """Wall time spent on compiling programs, or on loading them from disk; of the background once it has ended."""
        return self._foreground_seconds + self._background.seconds

    def is_pending(self, spec: ProgramSpec) -> bool:
        """Returns whether a program is being compiled in the background, or will be."""
        return spec in self._background

    def get(self, spec: ProgramSpec, build: Callable[[], Lowering]) -> Program:
        """Returns the program of a spec; compiles it the first time, from the result of `build`.

        One that the background has begun is waited for, and one that waits there is compiled here.

        Raises:
            ProgramRefused: it failed its audit, or is missing after `seal` in strict mode. The manifest is unchanged.
            ValueError: its arguments are no arrays with a dtype.
        """
        # Asked first: a program that the background compiles is in the manifest before it is no longer pending.
        is_pending = self.is_pending(spec)
        program = self._programs.get(spec)
        if program is None:
            if self._sealed and not is_pending:
                self._count_late(spec)
            with self._compiling(spec.name):
                self._background.claim(spec)
                program = self._programs.get(spec)
                if program is None:
                    program = compile_program(spec, build(), audited=self.audit)
                    self._programs[spec] = program
        return program

    def get_all(
        self, builds: Mapping[ProgramSpec, Callable[[], Lowering]], *, progress: bool = False
    ) -> list[Program]:
        """Returns several programs; XLA compiles the missing ones in parallel, while this thread traces others.

        Args:
            builds: spec -> a function that returns what to compile, as for `get`.
            progress: show a bar on stderr.

        Raises:
            ProgramRefused, ValueError: as for `get`. If one fails in compiling, the manifest keeps the others; if one
                fails in tracing, it keeps none of them.
        """
        for spec in builds:
            self._background.claim(spec)
        missing = {spec: build for spec, build in builds.items() if spec not in self._programs}
        if self._sealed:
            for spec in missing:
                self._count_late(spec)
        # `repaired_entries` changes global state, so it is entered once, around all threads.
        with (
            self._compiling(f"{len(missing)} programs"),
            TRACING_LOCK,
            # Traces are millions of live objects, which the collector would scan often.
            without_garbage_collection(),
            repaired_entries(),
            LoweringHelpers() as helpers,
            ThreadPoolExecutor(most_workers()) as pool,
            tqdm(total=len(missing), desc="compiling", unit="program", disable=not progress) as bar,
        ):
            started: dict[ProgramSpec, Future[Built]] = {}
            try:
                for spec, program in ready_builds(missing.items(), helpers):
                    started[spec] = pool.submit(program.finish)
                    started[spec].add_done_callback(lambda _: bar.update())
                self._collect(started)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [self._programs[spec] for spec in builds]

    def compile_in_background(
        self,
        lowerings: Mapping[ProgramSpec, Lowering],
        on_compiled: Callable[[Program], None],
        *,
        optional: bool = False,
    ) -> None:
        """Compiles the missing ones of these programs in a thread, while others run, and returns at once.

        Contexts of JAX that are open in this thread, such as `jax.enable_x64`, do not hold in others; inside of one the
        programs are compiled before this returns. Python's garbage collector is off until all are compiled.

        Args:
            lowerings: spec -> what to compile, without arrays.
            on_compiled: called with each of these programs once it is in the manifest, in another thread.
            optional: all goes on without these programs, so none is compiled inside of such a context, and `wait` does
                not raise their errors.
        """
        if threads_have_settings():
            self._background.add(
                {spec: Task(one, on_compiled, optional) for spec, one in lowerings.items()}
            )
            return
        if optional:
            return
        builds = {
            spec: lambda one=one: one
            for spec, one in lowerings.items()
            if spec not in self._programs
        }
        for program in self.get_all(builds):
            on_compiled(program)

    def wait(self) -> None:
        """Waits until the background has compiled all its programs.

        Raises:
            ProgramRefused, ValueError, RuntimeError: the first error of those that failed.
        """
        self._background.wait()

    def _keep(self, spec: ProgramSpec, built: Built, task: Task) -> None:
        """Adds a program that the background has built."""
        program = self._programs[spec] = _program(spec, built, audited=self.audit)
        task.on_compiled(program)

    def add(self, built: Mapping[ProgramSpec, Built]) -> None:
        """Adds programs that are built already.

        Raises:
            ProgramRefused: one has failed its audit; none of those after it is added.
        """
        for spec, one in built.items():
            self._programs[spec] = _program(spec, one, audited=self.audit)

    def _collect(self, started: Mapping[ProgramSpec, Future[Built]]) -> None:
        """Adds every program that compiled to the manifest, then raises the first error of the others."""
        failure: BaseException | None = None
        for spec, future in started.items():
            if future.exception() is not None:
                failure = failure or future.exception()
                continue
            try:
                self._programs[spec] = _program(spec, future.result(), audited=self.audit)
            except ProgramRefused as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @contextmanager
    def watched(self, callback: Callable[[str], None]) -> Iterator[None]:
        """Within the block, calls `callback` with a program's name before each compilation, and with "" after it.

        Args:
            callback: called in the thread that calls `get` or `get_all`.
        """
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    @contextmanager
    def _compiling(self, name: str) -> Iterator[None]:
        """Calls the callbacks, and adds the block's wall time to `compile_seconds`."""
        for callback in self._callbacks:
            callback(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._foreground_seconds += time.perf_counter() - start
            for callback in self._callbacks:
                callback("")

    def seal(self) -> None:
        """Ends the warm-up. After it a missing program raises in strict mode, and otherwise is logged and counted."""
        self._sealed = True

    def unseal(self) -> None:
        """Starts another warm-up, which ends with `seal`."""
        self._sealed = False

    def clear(self) -> None:
        """Removes all programs, and ends the compilations of the background."""
        self._background.stop()
        self._programs.clear()

    def manifest(self) -> tuple[Program, ...]:
        """Returns every program, sorted by spec."""
        return tuple(self._programs[spec] for spec in sorted(self._programs))

    def _count_late(self, spec: ProgramSpec) -> None:
        """Raises for a program that is missing after `seal` in strict mode, and otherwise logs and counts it."""
        difference = _difference(spec, list(self._programs))
        if self.strict:
            raise ProgramRefused(
                f"{spec} was not compiled before serving began; {difference}; declare it for the warm-up, or "
                f"turn strict mode off"
            )
        self.compiled_late += 1
        _LOG.warning("compiling %s while serving; %s", spec, difference)


def compile_program(spec: ProgramSpec, lowering: Lowering, *, audited: bool = True) -> Program:
    """Traces, lowers, compiles and audits one program, or loads it from disk.

    Raises:
        ProgramRefused: it does not update its cache in place, or closes over weights.
        ValueError: its arguments are no arrays with a dtype.
    """
    with TRACING_LOCK, repaired_entries():
        return _program(spec, Build(spec.name, lowering).finish(), audited=audited)


def _program(spec: ProgramSpec, built: Built, *, audited: bool) -> Program:
    if audited:
        built.report.raise_if_bad(str(spec))
    return Program(spec, built)


def _difference(spec: ProgramSpec, known: list[ProgramSpec]) -> str:
    """Returns how a spec differs from the most similar known one."""
    if not known:
        return "no program is known"
    wanted, others = _parts(spec), [_parts(other) for other in known]
    differences = [_unlike(wanted, other) for other in others]
    nearest = min(range(len(known)), key=lambda at: len(differences[at]))
    listed = ", ".join(
        f"{name} is {others[nearest].get(name)}, not {wanted.get(name)}"
        for name in differences[nearest]
    )
    return f"in the nearest one, {known[nearest]}, {listed}"


def _parts(spec: ProgramSpec) -> dict[str, object]:
    return {"kind": spec.kind, **spec.sizes()}


def _unlike(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
