"""`CommandLoop`: an engine that serves commands of other threads, in a thread of its own."""

import queue
import time
from collections.abc import Callable

from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock

Command = Callable[[], None]


class CommandLoop:
    """Runs commands between two steps, and steps while the engine has work.

    Args:
        engine: serves the requests that commands add.
        lock: the engine's lock, which is lent to the loop.
        after_step: called after each step, to read what the requests got.

    Attributes:
        step_began: seconds of `time.monotonic` at which the current step began, without its time in compilation;
            `None` between steps and during a compilation.
        compiling: name of the program that is being compiled; empty if there is none.
    """

    def __init__(self, engine: Engine, lock: EngineLock, after_step: Command) -> None:
        self.step_began: float | None = None
        self.compiling = ""
        self._engine = engine
        self._lock = lock
        self._after_step = after_step
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """Queues a command; any thread may."""
        self._commands.put(command)

    def end(self) -> None:
        """Queues the end of `run`; any thread may."""
        self._commands.put(None)

    def run(self) -> None:
        """Serves until `end`, in the calling thread.

        Raises:
            Exception: the engine has failed, or a command has.
        """
        with self._engine.runner.programs.watched(self._note_compiling):
            while self._run_commands():
                self._lock.run_deferred()
                self.step_began = time.monotonic()
                try:
                    self._engine.step()
                finally:
                    self.step_began = None
                self._after_step()

    def run_left(self) -> None:
        """Runs the commands that came too late for `run`, after its end."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()

    def _run_commands(self) -> bool:
        """Runs all queued commands; waits for one if the engine has no work. Returns False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _note_compiling(self, program: str) -> None:
        self.compiling = program
        self.step_began = None if program else time.monotonic()
