"""`Replica`: the process of one replica as its front sees it: calls, their results, and its end."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from jaxkv.errors import ReplicaLost
from jaxkv.links.channel import child_channel
from jaxkv.replicas.devices import child_environment
from jaxkv.replicas.messages import VALUES, Facts, as_error

_END_SECONDS = 10.0


class Replica:
    """A process that has an `LLM` of its own. Any thread may call it; a thread of its own reads the answers.

    Args:
        number: its number, from 0.
        count: number of all replicas.
        options: arguments of its `LLM`.
        environment: variables of its process, which choose its devices.

    Attributes:
        name: what messages call it.
        loaded: the facts about its model, once it has loaded it, or the error that kept it from that.
        num_open: samples of the calls in progress.

    Raises:
        ValueError: an option cannot be sent to a process.
        OSError: the process cannot be started.
    """

    def __init__(
        self, number: int, count: int, options: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.name = f"replica {number} of {count}"
        self.loaded: Future[Facts] = Future()
        self.num_open = 0
        self._failure: ReplicaLost | None = None
        self._calls: dict[int, tuple[Future[Any], int]] = {}
        self._readers: dict[int, Callable[[list[Any]], None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._channel, theirs = child_channel(VALUES)
        with theirs:
            self._process = subprocess.Popen(
                # -P: a file of the current folder must not stand in for a module.
                [sys.executable, "-P", "-m", "jaxkv.replica_program", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**child_environment(), **environment},
                # A terminal's Ctrl-C is for the front, which aborts what it has begun.
                process_group=0,
            )
        self._reader = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._reader.start()
        try:
            self._channel.send("start", dict(options))
        except ValueError:
            self.close()
            raise
        except OSError:
            return  # It has ended; the reader finds out why.

    @property
    def failure(self) -> ReplicaLost | None:
        """Why it takes no call; `None` while it works."""
        return self._failure

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def call(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        samples: int = 0,
        pieces: Callable[[list[Any]], None] | None = None,
    ) -> "Future[Any]":
        """Begins an operation of the replica; returns its result to come. Cancelling that aborts the operation.

        Args:
            operation: name of a method of `jaxkv.replica_program.Operations`.
            arguments: its arguments.
            samples: samples that it generates, which count as load.
            pieces: called in the reader's thread with each list of pieces of a stream.

        Raises:
            ReplicaLost: its process has ended.
            ValueError: an argument cannot be sent.
            RuntimeError: this process was forked from the one that started the replica.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{self.name} belongs to process {self._owner}, from which this one was forked; make an LLM here"
            )
        result: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = next(self._numbers)
            self._calls[number] = result, samples
            self.num_open += samples
            if pieces is not None:
                self._readers[number] = pieces
        result.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        try:
            self._channel.send("call", number, operation, dict(arguments))
        except OSError:
            return result  # The reader fails it.
        except ValueError:
            self._taken(number)
            raise
        except BaseException:
            # An interrupt may have cut the message short, and the process would read the next one as its rest.
            self._lose(ReplicaLost(f"{self.name} was ended, since a message to it was interrupted"))
            self._channel.close()
            raise
        return result

    def close(self) -> None:
        """Ends the process; calls in progress raise. A second call does nothing."""
        self._lose(ReplicaLost("this LLM was closed and its memory freed; make another LLM"))
        self._channel.close()
        if os.getpid() != self._owner:
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _cancel(self, number: int) -> None:
        """Tells the replica that no caller waits for a call."""
        if self._taken(number) is not None:
            with suppress(OSError):
                self._channel.send("cancel", number)

    def _taken(self, number: int) -> "Future[Any] | None":
        """Takes a call out of those in progress; `None` if it is over."""
        with self._lock:
            self._readers.pop(number, None)
            result, samples = self._calls.pop(number, (None, 0))
            self.num_open -= samples
        return result

    # The reader's thread.

    def _read(self) -> None:
        """Reads until the process ends."""
        why = ""
        try:
            while (message := self._channel.receive()) is not None:
                self._take(*message)
        except (ValueError, TypeError) as error:
            why = f": {error}"
        self._channel.close()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        ended = f"has ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        self._lose(ReplicaLost(f"{self.name} (process {self.pid}) {ended}{why}"))

    def _take(self, kind: str, number: int, value: Any) -> None:  # noqa: ANN401 - any result
        if kind == "pieces":
            if (read := self._readers.get(number)) is not None:
                read(value)
            return
        result = self.loaded if kind in ("ready", "refused") else self._taken(number)
        if result is None or not result.set_running_or_notify_cancel():
            return
        if kind in ("error", "refused"):
            result.set_exception(as_error(value))
        else:
            result.set_result(value)

    def _lose(self, failure: ReplicaLost) -> None:
        """Fails all calls and refuses new ones; only the first reason counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            open_calls = [result for result, _ in self._calls.values()]
            self._calls.clear()
            self._readers.clear()
            self.num_open = 0
        for result in (*open_calls, self.loaded):
            if not result.done() and result.set_running_or_notify_cancel():
                result.set_exception(failure)
