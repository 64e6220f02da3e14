"""Programs compiled ahead of time, and the manifest of them. Knows nothing of what a program computes.

A program takes arrays of fixed shapes, one of them the cache, which it donates and returns first. Nothing is
compiled by calling one, and compiling runs nothing, so warming up leaves every cache as it was.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

import jax
import numpy as np

from jaxkv.batch import Features
from jaxkv.engine.audit import AuditReport, audit
from jaxkv.engine.compile_cache import repaired_entries
from jaxkv.engine.lowering import Lowering, lower
from jaxkv.errors import ProgramRefused

_LOG = logging.getLogger(__name__)
_PLAIN = Features()

# Otherwise XLA lets kernels read whole pieces of the packed array through fusions that no command buffer takes, and a
# step of 64 rows falls apart into some 30 of them. A copy of a piece is one node, for all layers.
_COMPILER_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}


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
        return f"{self.kind}_{self.tokens}x{self.rows}x{self.table_width}"

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
        seconds: time to trace, lower and compile it, or to load it from the compilation cache.
        loaded: it came from the compilation cache.
        report: what the audit found, and its bytes.
        compiled: what JAX made of it.
    """

    def __init__(
        self,
        key: ProgramKey,
        compiled: jax.stages.Compiled,
        report: AuditReport,
        *,
        seconds: float,
        loaded: bool,
    ) -> None:
        self.key = key
        self.report = report
        self.seconds = seconds
        self.loaded = loaded
        self.compiled = compiled
        arguments = compiled.args_info[0]
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
    """Lowers, compiles and audits one program.

    Raises:
        ProgramRefused: it does not update its cache in place, or carries weights in its code.
        ValueError: its arguments are not typed arrays.
    """
    start = time.perf_counter()
    hits = _EVENTS.cache_hits
    with repaired_entries():
        options = {**_COMPILER_OPTIONS, **(lowering.compiler_options or {})}
        compiled = lower(key.name, lowering).compile(compiler_options=options)
    report = audit(compiled, cache_argument=lowering.cache_argument)
    if audited:
        report.raise_if_bad(str(key))
    seconds = time.perf_counter() - start
    return Program(key, compiled, report, seconds=seconds, loaded=_EVENTS.cache_hits > hits)


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


class _Events:
    """Counts what JAX reports of its compiler, from the import of this module on."""

    def __init__(self) -> None:
        self.compiles = 0
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        self.compiles += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"


_EVENTS = _Events()


def compile_count() -> int:
    """Returns how often this process has compiled anything, or loaded it from the compilation cache."""
    return _EVENTS.compiles
