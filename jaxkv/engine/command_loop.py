"""`CommandLoop`: an engine that serves commands of other threads, in a thread of its own; `StepTimer` watches it."""

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock

_LOG = logging.getLogger(__name__)

Command = Callable[[], None]


@runtime_checkable
class Inlet(Protocol):
    """A source of work, such as a socket, that the loop's own thread reads between two steps."""

    def receive(self, *, wait: bool) -> None:
        """Handles all that has arrived.

        Args:
            wait: wait first until something arrives or `wake` is called; otherwise return at once.
        """
        ...

    def wake(self) -> None:
        """Ends a `receive` that waits, or the next one that would; any thread may call it."""
        ...


class CommandLoop:
    """Runs commands between two steps, and steps while the engine has work.

    Args:
        engine: serves the requests that commands add.
        lock: the engine's lock, which is lent to the loop.
        after_step: called after each step, to read what the requests got.
        inlet: read between two steps, and waited for while the engine has no work; `None` if all work comes by `put`.

    Attributes:
        step_began: seconds of `time.monotonic` at which the current step began, without its time in compilation;
            `None` between steps and during a compilation.
        compiling: name of the program that is being compiled; empty if there is none.
    """

    def __init__(
        self, engine: Engine, lock: EngineLock, after_step: Command, inlet: Inlet | None = None
    ) -> None:
        self.step_began: float | None = None
        self.compiling = ""
        self._engine = engine
        self._lock = lock
        self._after_step = after_step
        self._inlet = inlet
        self._stepping = False
        self._later: list[Command] = []
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Queues a command; any thread may."""
        self._commands.put(command)
        if self._inlet is not None:
            self._inlet.wake()

    def put_later(self, command: Command) -> None:
        """Queues a command for after the next step, for a command that found too few free pages."""
        self._later.append(command)

    def end(self) -> None:
        """Queues the end of `run`; any thread may."""
        self._commands.put(None)
        if self._inlet is not None:
            self._inlet.wake()

    def run(self) -> None:
        """Serves until `end`, in the calling thread.

        Raises:
            Exception: the engine has failed, or a command has.
        """
        with self._engine.runner.programs.watched(self._note_compiling):
            while self._run_commands():
                self._lock.run_deferred()
                self._stepping, self.step_began = True, time.monotonic()
                try:
                    self._engine.step()
                finally:
                    self._stepping, self.step_began = False, None
                self._after_step()
                self._run_later()

    def run_left(self) -> None:
        """Runs the commands that came too late for `run`, and those of `put_later`, after its end.

        One that raises does not keep the others from running.
        """
        later, self._later = self._later, []
        while later or not self._commands.empty():
            command = later.pop(0) if later else self._commands.get()
            try:
                if command is not None:
                    command()
            except Exception:
                _LOG.exception("a command failed after the engine's end")

    def _run_commands(self) -> bool:
        """Runs all queued commands; waits for work if the engine has none. Returns False at the end."""
        inlet = self._inlet
        while True:
            if not self._engine.has_work:
                # An abort has ended the work that they waited for, so there is no next step.
                self._run_later()
            if inlet is not None:
                inlet.receive(wait=False)
            if not (self._engine.has_work or self._later) and self._commands.empty():
                self._engine.check_if_idle()
                if inlet is not None:
                    inlet.receive(wait=True)
            try:
                command = self._commands.get(block=inlet is None and not self._engine.has_work)
            except queue.Empty:
                if self._engine.has_work:
                    return True
                continue
            if command is None:
                return False
            command()

    def _run_later(self) -> None:
        later, self._later = self._later, []
        try:
            while later:
                later.pop(0)()
        finally:
            # Empty unless one has raised; `run_left` runs these.
            self._later = later + self._later

    def _note_compiling(self, program: str) -> None:
        self.compiling = program
        self.step_began = None if program or not self._stepping else time.monotonic()


class StepTimer:
    """Measures how long a step has taken while the process ran; a suspension of the process counts as little.

    Args:
        interval: seconds between two readings, while the process runs.
        now: seconds of the clock.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._most = 2 * interval
        self._last = now
        self._began: float | None = None
        self._seconds = 0.0

    def seconds(self, began: float | None, now: float) -> float:
        """Returns how long the current step has taken.

        Args:
            began: when it began; `None` between steps.
            now: seconds of the clock.
        """
        passed, self._last = now - self._last, now
        if began is None:
            self._began, self._seconds = None, 0.0
        elif began != self._began:
            self._began, self._seconds = began, min(now - began, self._most)
        else:
            self._seconds += min(passed, self._most)
        return self._seconds
