"""Programs compiled ahead of time, and the manifest of them. Knows nothing of what a program computes.

A program takes arrays of fixed shapes, one of them the cache, which it donates and returns first. Nothing is
compiled by calling one, and compiling runs nothing, so warming up leaves every cache as it was.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxkv.batch import Features
from jaxkv.engine.compilation import Built, begin, compile_count
from jaxkv.engine.compile_cache import repaired_entries
from jaxkv.engine.lowering import Lowering
from jaxkv.errors import ProgramRefused

__all__ = ["Lowering", "Program", "ProgramKey", "Programs", "compile_count", "compile_program"]

_LOG = logging.getLogger(__name__)
_PLAIN = Features()
_MOST_WORKERS = 16


@dataclass(frozen=True)
class ProgramKey:
    """Everything a program was compiled for; programs sort by it.

    Attributes:
        kind: what it does: "decode", "prefill", "generate", "score", "admit", "copy_pages", ...
        tokens, rows: most new tokens and most sequences of a step.
        table_width: most pages of a sequence.
        features: how it can choose tokens.
        extra: further sizes by name.
    """

    kind: str
    tokens: int
    rows: int
    table_width: int
    features: Features = _PLAIN
    extra: tuple[tuple[str, int], ...] = ()

    def __lt__(self, other: "ProgramKey") -> bool:
        return self._rank < other._rank

    def __str__(self) -> str:
        parts = [
            f"{name}={value}"
            for name, value in self.values().items()
            if name != "kind" and value is not None and value is not False
        ]
        return f"{self.kind}({', '.join(parts)})"

    @property
    def name(self) -> str:
        """The name that XLA, profiles and the compilation cache know the program by."""
        kind = f"fresh_{self.kind}" if ("fresh", 1) in self.extra else self.kind
        return f"{kind}_{self.tokens}x{self.rows}x{self.table_width}"

    def values(self) -> dict[str, str | int | bool | None]:
        """Returns every part of the key by name, in order."""
        features = {part.name: getattr(self.features, part.name) for part in fields(self.features)}
        sizes = {"tokens": self.tokens, "rows": self.rows, "table_width": self.table_width}
        return {"kind": self.kind} | sizes | features | dict(self.extra)

    @property
    def _rank(self) -> tuple:
        features = tuple((value is not None, value or 0) for value in astuple(self.features))
        return (self.kind, self.tokens, self.rows, self.table_width, features, self.extra)


class Program:
    """One compiled program. Calling it donates its cache argument.

    Attributes:
        key: what it was compiled for.
        seconds: time to trace, lower and compile it, or to load it from disk.
        host_seconds: of those, in the thread that traced and lowered it.
        loaded: an earlier process compiled it.
        report: what the audit found, and its bytes.
        compiled: what JAX made of it.
    """

    def __init__(self, key: ProgramKey, built: Built) -> None:
        self.key = key
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
                f"argument {position} of {self.key} must be {dtype}, got {told}; convert it"
            )


class Programs:
    """The manifest: every program compiled so far, by key.

    Args:
        strict: once sealed, refuse to compile.
        audit: refuse programs that do not update their cache in place.
    """

    def __init__(self, *, strict: bool = False, audit: bool = True) -> None:
        self.strict = strict
        self.audit = audit
        self.compiled_late = 0
        """Programs compiled since `seal`."""
        self._sealed = False
        self._programs: dict[ProgramKey, Program] = {}

    @property
    def is_closed(self) -> bool:
        """Whether a missing program is refused from now on."""
        return self.strict and self._sealed

    def get(self, key: ProgramKey, build: Callable[[], Lowering]) -> Program:
        """Returns the program of a key; compiles it the first time, from what `build` returns.

        Raises:
            ProgramRefused: it failed its audit, or is missing after `seal` in strict mode. The manifest is unchanged.
            ValueError: its arguments are not typed arrays.
        """
        program = self._programs.get(key)
        if program is None:
            if self._sealed:
                self._meet_late(key)
            program = self._programs[key] = compile_program(key, build(), audited=self.audit)
        return program

    def get_all(
        self, builds: Mapping[ProgramKey, Callable[[], Lowering]], *, progress: bool = False
    ) -> list[Program]:
        """Returns many programs; XLA compiles the missing ones side by side, while others are traced here.

        Args:
            builds: what `get` takes, by key.
            progress: show a bar on stderr.

        Raises:
            ProgramRefused, ValueError: as `get`. The good ones are kept, unless it was in tracing that one failed.
        """
        missing = {key: build for key, build in builds.items() if key not in self._programs}
        if self._sealed:
            for key in missing:
                self._meet_late(key)
        # `repaired_entries` is open once around all threads, since it changes what they share.
        with (
            _uncollected(),
            repaired_entries(),
            ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as pool,
            tqdm(total=len(missing), desc="compiling", unit="program", disable=not progress) as bar,
        ):
            started: dict[ProgramKey, Future[Built]] = {}
            try:
                for key, build in missing.items():
                    started[key] = pool.submit(begin(key.name, build()))
                    started[key].add_done_callback(lambda _: bar.update())
                self._collect(started)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [self._programs[key] for key in builds]

    def _collect(self, started: Mapping[ProgramKey, Future[Built]]) -> None:
        """Keeps every good program, and then raises what the first bad one failed with."""
        failure: BaseException | None = None
        for key, future in started.items():
            if future.exception() is not None:
                failure = failure or future.exception()
                continue
            try:
                self._programs[key] = _program(key, future.result(), audited=self.audit)
            except ProgramRefused as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def seal(self) -> None:
        """Ends the warm-up: from now on a missing program is an error if strict, and else logged and counted."""
        self._sealed = True

    def unseal(self) -> None:
        """Opens the manifest for another warm-up; end it with `seal`."""
        self._sealed = False

    def manifest(self) -> tuple[Program, ...]:
        """Returns every program, sorted by key."""
        return tuple(self._programs[key] for key in sorted(self._programs))

    def table(self) -> str:
        """Returns the manifest as text: what each program took to compile, and the memory it needs."""
        rows = [["program", "seconds", "temporary MiB", "in place MiB"]]
        for program in self.manifest():
            report = program.report
            numbers = (program.seconds, report.temp_bytes / 2**20, report.alias_bytes / 2**20)
            rows.append([str(program.key), *(f"{number:.2f}" for number in numbers)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return "\n".join("  ".join(line) for line in lines)

    def _meet_late(self, key: ProgramKey) -> None:
        difference = _difference(key, list(self._programs))
        if self.strict:
            raise ProgramRefused(
                f"{key} was not compiled before serving began; {difference}; declare it for the warm-up, or "
                f"turn strict mode off"
            )
        self.compiled_late += 1
        _LOG.warning("compiling %s while serving; %s", key, difference)


def compile_program(key: ProgramKey, lowering: Lowering, *, audited: bool = True) -> Program:
    """Traces, lowers, compiles and audits one program, or finds it on disk.

    Raises:
        ProgramRefused: it does not update its cache in place, or carries weights in its code.
        ValueError: its arguments are not typed arrays.
    """
    with repaired_entries():
        return _program(key, begin(key.name, lowering)(), audited=audited)


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


def _program(key: ProgramKey, built: Built, *, audited: bool) -> Program:
    if audited:
        built.report.raise_if_bad(str(key))
    return Program(key, built)


def _difference(key: ProgramKey, known: list[ProgramKey]) -> str:
    """Says how a key differs from the one that is most like it."""
    if not known:
        return "no program is known"
    wanted = key.values()
    differences = [_unlike(wanted, other.values()) for other in known]
    nearest = min(range(len(known)), key=lambda at: len(differences[at]))
    told = ", ".join(
        f"{name} is {known[nearest].values().get(name)}, not {wanted.get(name)}"
        for name in differences[nearest]
    )
    return f"in the nearest one, {known[nearest]}, {told}"


def _unlike(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
