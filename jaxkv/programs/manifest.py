"""Programs compiled ahead of time, and the manifest that holds them by spec.

A program takes arrays of fixed shapes, one of them the cache, which it donates and returns first. Nothing is
compiled by calling one, and compiling runs nothing, so warming up leaves every cache as it was.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxkv.errors import ProgramRefused
from jaxkv.programs.compile import Built, begin, compile_count
from jaxkv.programs.jax_cache import repaired_entries
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec

__all__ = ["Lowering", "Program", "Programs", "compile_count", "compile_program"]

_LOG = logging.getLogger(__name__)
_MOST_WORKERS = 16


class Program:
    """One compiled program. Calling it donates its cache argument.

    Attributes:
        spec: what it was compiled for.
        seconds: time to trace, lower and compile it, or to load it from disk.
        host_seconds: of those, in the thread that traced and lowered it.
        loaded: an earlier process compiled it.
        report: what the audit found, and its bytes.
        compiled: what JAX made of it.
    """

    def __init__(self, spec: ProgramSpec, built: Built) -> None:
        self.spec = spec
        self.report = built.report
        self.seconds = built.seconds
        self.host_seconds = built.host_seconds
        self.loaded = built.loaded
        self.compiled = built.compiled
        arguments = built.compiled.args_info[0]
        # Host arrays come as arguments of their own; those inside params and cache are device arrays already.
        self._lone = tuple(
            (position, argument.dtype)
            for position, argument in enumerate(arguments)
            if isinstance(argument, jax.stages.ArgInfo)
        )

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401 - whatever the program takes and returns
        """Runs the program; refuses arrays of another dtype, which JAX would cast without a word."""
        for position, dtype in self._lone:
            # Built-in dtypes are single objects, so this decides nearly every call without comparing.
            if getattr(arguments[position], "dtype", None) is not dtype:
                self._check_dtype(position, dtype, arguments[position])
        return self.compiled(*arguments)

    def _check_dtype(self, position: int, dtype: np.dtype, argument: object) -> None:
        given = getattr(argument, "dtype", None)
        if given != dtype:
            told = given or type(argument).__name__
            raise ValueError(
                f"argument {position} of {self.spec} must be {dtype}, got {told}; convert it"
            )


class Programs:
    """The manifest: every program compiled so far, by spec.

    Args:
        strict: once sealed, refuse to compile.
        audit: refuse programs that do not update their cache in place.
    """

    def __init__(self, *, strict: bool = False, audit: bool = True) -> None:
        self.strict = strict
        self.audit = audit
        self.compiled_late = 0
        """Programs compiled since `seal`."""
        self.compile_seconds = 0.0
        """Wall time spent on compiling programs, or on loading them from disk."""
        self._sealed = False
        self._programs: dict[ProgramSpec, Program] = {}
        self._watchers: list[Callable[[str], None]] = []

    @property
    def is_closed(self) -> bool:
        """Whether a missing program is refused from now on."""
        return self.strict and self._sealed

    def get(self, spec: ProgramSpec, build: Callable[[], Lowering]) -> Program:
        """Returns the program of a spec; compiles it the first time, from what `build` returns.

        Raises:
            ProgramRefused: it failed its audit, or is missing after `seal` in strict mode. The manifest is unchanged.
            ValueError: its arguments are not typed arrays.
        """
        program = self._programs.get(spec)
        if program is None:
            if self._sealed:
                self._meet_late(spec)
            with self._compiling(spec.name):
                program = self._programs[spec] = compile_program(spec, build(), audited=self.audit)
        return program

    def get_all(
        self, builds: Mapping[ProgramSpec, Callable[[], Lowering]], *, progress: bool = False
    ) -> list[Program]:
        """Returns many programs; XLA compiles the missing ones side by side, while others are traced here.

        Args:
            builds: what `get` takes, by spec.
            progress: show a bar on stderr.

        Raises:
            ProgramRefused, ValueError: as `get`. The good ones are kept, unless it was in tracing that one failed.
        """
        missing = {spec: build for spec, build in builds.items() if spec not in self._programs}
        if self._sealed:
            for spec in missing:
                self._meet_late(spec)
        # `repaired_entries` is open once around all threads, since it changes what they share.
        with (
            self._compiling(f"{len(missing)} programs"),
            _uncollected(),
            repaired_entries(),
            ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as pool,
            tqdm(total=len(missing), desc="compiling", unit="program", disable=not progress) as bar,
        ):
            started: dict[ProgramSpec, Future[Built]] = {}
            try:
                for spec, build in missing.items():
                    started[spec] = pool.submit(begin(spec.name, build()))
                    started[spec].add_done_callback(lambda _: bar.update())
                self._collect(started)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [self._programs[spec] for spec in builds]

    def _collect(self, started: Mapping[ProgramSpec, Future[Built]]) -> None:
        """Keeps every program that compiled, then raises the error of the first one that failed."""
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
    def watched(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Calls `tell` meanwhile with a program's name before it is compiled, and with "" afterwards.

        Args:
            tell: is called in the thread that compiles.
        """
        self._watchers.append(tell)
        try:
            yield
        finally:
            self._watchers.remove(tell)

    @contextmanager
    def _compiling(self, name: str) -> Iterator[None]:
        """Tells the watchers, and adds the wall time."""
        for tell in self._watchers:
            tell(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.compile_seconds += time.perf_counter() - start
            for tell in self._watchers:
                tell("")

    def seal(self) -> None:
        """Ends the warm-up: from now on a missing program is an error if strict, and else logged and counted."""
        self._sealed = True

    def unseal(self) -> None:
        """Opens the manifest for another warm-up; end it with `seal`."""
        self._sealed = False

    def clear(self) -> None:
        """Forgets every program, as if none had been compiled."""
        self._programs.clear()

    def manifest(self) -> tuple[Program, ...]:
        """Returns every program, sorted by spec."""
        return tuple(self._programs[spec] for spec in sorted(self._programs))

    def _meet_late(self, spec: ProgramSpec) -> None:
        difference = _difference(spec, list(self._programs))
        if self.strict:
            raise ProgramRefused(
                f"{spec} was not compiled before serving began; {difference}; declare it for the warm-up, or "
                f"turn strict mode off"
            )
        self.compiled_late += 1
        _LOG.warning("compiling %s while serving; %s", spec, difference)


def compile_program(spec: ProgramSpec, lowering: Lowering, *, audited: bool = True) -> Program:
    """Traces, lowers, compiles and audits one program, or finds it on disk.

    Raises:
        ProgramRefused: it does not update its cache in place, or carries weights in its code.
        ValueError: its arguments are not typed arrays.
    """
    with repaired_entries():
        return _program(spec, begin(spec.name, lowering)(), audited=audited)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Puts Python's garbage collector off: a trace is millions of objects that stay, and it would visit them often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
    told = ", ".join(
        f"{name} is {others[nearest].get(name)}, not {wanted.get(name)}"
        for name in differences[nearest]
    )
    return f"in the nearest one, {known[nearest]}, {told}"


def _parts(spec: ProgramSpec) -> dict[str, object]:
    return {"kind": spec.kind, **spec.sizes()}


def _unlike(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
