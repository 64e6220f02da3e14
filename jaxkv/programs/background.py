"""`BackgroundCompiler`: compiles programs in a thread of its own, while the programs that exist run."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from jaxkv.memory import without_garbage_collection
from jaxkv.programs.compile import TURN, Built, most_workers, ready_builds
from jaxkv.programs.jax_cache import repaired_entries
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from pallas_kernels.lowering_helpers import LoweringHelpers

_LOG = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0002
"""Seconds after which a thread that runs Python lets another one run; each step waits a few times for its turn."""
_usual: list[float] = []
"""For each thread that compiles, the seconds of before."""


class BackgroundCompiler:
    """Compiles programs in the order in which they were added, in a thread that ends after the last one.

    The thread holds `TURN` while it traces or lowers one program, so others that compile wait for one at most. When the
    main thread has ended, it ends after the programs that XLA works on.

    Args:
        keep: called with each program that is built, in a thread of XLA. If it raises, the program has failed.
    """

    def __init__(self, keep: Callable[[ProgramSpec, Built], None]) -> None:
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: dict[ProgramSpec, Lowering] = {}
        self._begun: set[ProgramSpec] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._failures: list[BaseException] = []
        self.seconds = 0.0
        """Wall time of the thread, once it has ended."""

    def __contains__(self, spec: ProgramSpec) -> bool:
        return spec in self._waiting or spec in self._begun

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    def add(self, lowerings: Mapping[ProgramSpec, Lowering]) -> None:
        """Adds programs behind those that wait, and starts the thread if it does not run."""
        with self._changed:
            self._is_stopped = False
            self._waiting |= {spec: one for spec, one in lowerings.items() if spec not in self}
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxkv-compiler")
                self._thread.start()

    def claim(self, spec: ProgramSpec) -> None:
        """Takes a program from those that wait; if the thread has begun it, waits until it is built or has failed."""
        with self._changed:
            if self._waiting.pop(spec, None) is None:
                self._changed.wait_for(lambda: spec not in self._begun)

    def wait(self) -> None:
        """Waits for all programs.

        Raises:
            ProgramRefused, ValueError, JaxRuntimeError: the first error of those that failed.
        """
        self._join()
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def stop(self) -> None:
        """Drops the programs that wait, and returns after those that XLA works on."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
        self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        start, ends = time.perf_counter(), False
        while not ends:
            try:
                self._compile_waiting()
            except Exception as error:
                self._note_failure("programs", error)
            with self._changed:
                # Those that an error left can still be compiled when they are needed.
                self._begun.clear()
                ends = not self._waiting or self._must_end
                if ends:
                    self._waiting.clear()
                    self.seconds += time.perf_counter() - start
                    self._thread = None
                self._changed.notify_all()

    @property
    def _must_end(self) -> bool:
        return self._is_stopped or not threading.main_thread().is_alive()

    def _compile_waiting(self) -> None:
        """Compiles the programs that wait, also those that are added before the last one is traced."""
        with (
            _entered_in_turn(_quick_switches()),
            _entered_in_turn(without_garbage_collection()),
            _entered_in_turn(repaired_entries()),
            LoweringHelpers() as helpers,
            ThreadPoolExecutor(most_workers()) as pool,
        ):
            for spec, build in ready_builds(self._next(), helpers):
                if self._must_end:
                    return
                done = pool.submit(build.finish)
                done.add_done_callback(lambda future, spec=spec: self._note_built(spec, future))

    def _next(self) -> Iterator[tuple[ProgramSpec, Callable[[], Lowering]]]:
        """Yields each program that waits, as begun."""
        while True:
            with self._changed:
                if not self._waiting or self._must_end:
                    return
                spec, lowering = next(iter(self._waiting.items()))
                # In this order, as others ask for it without the lock.
                self._begun.add(spec)
                del self._waiting[spec]
            yield spec, lambda lowering=lowering: lowering

    def _note_built(self, spec: ProgramSpec, future: Future[Built]) -> None:
        try:
            self._keep(spec, future.result())
        except Exception as error:
            self._note_failure(str(spec), error)
        with self._changed:
            self._begun.discard(spec)
            self._changed.notify_all()

    def _note_failure(self, what: str, error: Exception) -> None:
        if self._must_end:
            return
        _LOG.error("%s could not be compiled in the background: %r", what, error)
        self._failures.append(error)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Lets Python's threads take turns as often as `_SWITCH_SECONDS` says, until no thread is in such a block."""
    usual = _usual[0] if _usual else sys.getswitchinterval()
    _usual.append(usual)
    sys.setswitchinterval(min(usual, _SWITCH_SECONDS))
    try:
        yield
    finally:
        _usual.pop()
        if not _usual:
            sys.setswitchinterval(usual)


@contextmanager
def _entered_in_turn(block: AbstractContextManager[None]) -> Iterator[None]:
    """Enters and leaves a block that changes global state while no other thread is inside of such a one."""
    with TURN:
        block.__enter__()
    try:
        yield
    finally:
        with TURN:
            block.__exit__(None, None, None)


def threads_have_settings() -> bool:
    """Returns whether a new thread has JAX's settings of this one, which contexts such as `jax.enable_x64` change."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(_settings()))
    thread.start()
    thread.join()
    [others], own = found, _settings()
    return all(own[name] is other or own[name] == other for name, other in others.items())


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name, default) for name, default in jax.config.values.items()}
