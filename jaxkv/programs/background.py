"""`BackgroundCompiler`: compiles programs in a thread of its own, while the programs that exist run."""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from jaxkv.memory import without_garbage_collection
from jaxkv.programs.compile import TRACING_LOCK, Build, Built, most_workers, ready_builds
from jaxkv.programs.jax_cache import repaired_entries
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from pallas_kernels.lowering_helpers import LoweringHelpers, jax_settings

_LOG = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0002
"""Seconds after which a thread that runs Python lets another one run; each step waits a few times to run again."""
_intervals_before: list[float] = []
"""For each thread that compiles, the seconds of before."""


class Task(NamedTuple):
    """A program to compile.

    Attributes:
        lowering: what to compile, without arrays.
        on_compiled: called with the program, in a thread of XLA, once it can be used.
        is_optional: `wait` does not raise its error.
    """

    lowering: Lowering
    on_compiled: Callable[[Any], None]
    is_optional: bool = False


class BackgroundCompiler:
    """Compiles programs in the order in which they were added, in a thread that ends after the last one.

    The thread holds `TRACING_LOCK` while it traces or lowers one program, so others that compile wait for one at most.
    It ends early if the main thread or `keep`'s object is gone, after the programs that XLA works on.

    Args:
        keep: a method that is called with each program that is built, in a thread of XLA. If it raises, the program has
            failed.
        is_compiled: whether a program needs no compilation.
    """

    def __init__(
        self,
        keep: Callable[[ProgramSpec, Built, Task], None],
        is_compiled: Callable[[ProgramSpec], bool],
    ) -> None:
        # Programs belong to a runner, whose memory must not stay because of this thread.
        self._keep = weakref.WeakMethod(keep)
        self._is_compiled = is_compiled
        self._changed = threading.Condition()
        self._waiting: dict[ProgramSpec, Task] = {}
        self._begun: dict[ProgramSpec, Task] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._failures: list[BaseException] = []
        self.seconds = 0.0
        """Wall time of the threads that have ended."""

    def __contains__(self, spec: ProgramSpec) -> bool:
        return spec in self._waiting or spec in self._begun

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    def add(self, tasks: Mapping[ProgramSpec, Task]) -> None:
        """Adds the programs that are neither compiled nor here, and starts the thread if it does not run."""
        with self._changed:
            self._is_stopped = False
            self._waiting |= {
                spec: task
                for spec, task in tasks.items()
                if spec not in self and not self._is_compiled(spec)
            }
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
            ProgramRefused, ValueError, RuntimeError: the first error of those that failed.
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
        is_dropped = self._keep() is None
        return self._is_stopped or is_dropped or not threading.main_thread().is_alive()

    def _compile_waiting(self) -> None:
        """Compiles the programs that wait, also those that are added before the last one is traced."""
        with (
            _holding_lock_at_ends(_quick_switches()),
            _holding_lock_at_ends(without_garbage_collection()),
            repaired_entries(),
            LoweringHelpers() as helpers,
            ThreadPoolExecutor(most_workers()) as pool,
        ):
            builds = ready_builds(self._next(), helpers, failed=self._note_untraced)
            for spec, build in builds:
                if self._must_end:
                    return
                done = pool.submit(self._finish, build)
                done.add_done_callback(lambda future, spec=spec: self._note_built(spec, future))

    def _next(self) -> Iterator[tuple[ProgramSpec, Callable[[], Lowering]]]:
        """Yields each program that waits, as begun."""
        while True:
            with self._changed:
                if not self._waiting or self._must_end:
                    return
                spec, task = next(iter(self._waiting.items()))
                # In this order, as others ask for it without the lock.
                self._begun[spec] = task
                del self._waiting[spec]
            yield spec, lambda task=task: task.lowering

    def _finish(self, build: Build) -> Built | None:
        """Builds a program, in a thread of XLA; returns `None` if it is no longer needed."""
        return None if self._must_end else build.finish()

    def _note_built(self, spec: ProgramSpec, future: Future[Built | None]) -> None:
        try:
            built, keep = future.result(), self._keep()
            if built is not None and keep is not None:
                keep(spec, built, self._begun[spec])
        except Exception as error:
            self._note_failure(str(spec), error, self._begun.get(spec))
        self._end(spec)

    def _note_untraced(self, spec: ProgramSpec, error: Exception) -> None:
        self._note_failure(str(spec), error, self._begun.get(spec))
        self._end(spec)

    def _end(self, spec: ProgramSpec) -> None:
        with self._changed:
            self._begun.pop(spec, None)
            self._changed.notify_all()

    def _note_failure(self, what: str, error: Exception, task: Task | None = None) -> None:
        if self._must_end:
            return
        _LOG.error("%s could not be compiled in the background: %r", what, error)
        if task is not None and task.is_optional:
            return
        # The frames of the traceback keep traces alive.
        self._failures.append(error.with_traceback(None))


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Lets Python's threads take turns as often as `_SWITCH_SECONDS` says, until no thread is in such a block."""
    before = _intervals_before[0] if _intervals_before else sys.getswitchinterval()
    _intervals_before.append(before)
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        _intervals_before.pop()
        if not _intervals_before:
            sys.setswitchinterval(before)


@contextmanager
def _holding_lock_at_ends(block: AbstractContextManager[None]) -> Iterator[None]:
    """Holds `TRACING_LOCK` while it enters and while it leaves a block that changes global state."""
    with TRACING_LOCK:
        block.__enter__()
    try:
        yield
    finally:
        with TRACING_LOCK:
            block.__exit__(None, None, None)


def threads_have_settings() -> bool:
    """Returns whether a new thread has JAX's settings of this one, which contexts such as `jax.enable_x64` change."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(jax_settings()))
    thread.start()
    thread.join()
    [others], own = found, jax_settings()
    return all(own[name] is other or own[name] == other for name, other in others.items())
