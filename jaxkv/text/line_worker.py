"""`LineWorker`: a process that answers each line of JSON with a line of JSON, and is killed if it takes too long."""

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

_START_SECONDS = 120
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class LineWorker:
    """Runs a program that prints one line when it is ready, and then one line of JSON for each line that it reads.

    The process ends with this object, and when its stdin is closed.

    Args:
        program: the Python file. It runs as a file, so that it imports neither jaxkv nor a module beside it.
        arguments: its arguments.

    Raises:
        RuntimeError: the program cannot be run.
    """

    def __init__(self, program: Path, arguments: Sequence[object]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", str(program), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            # In a session of its own, so that Ctrl-C at the terminal does not reach the worker.
            start_new_session=True,
        )
        self._process = process
        self.stop = weakref.finalize(self, _end, process)
        if self._read_line(_START_SECONDS) is None:
            self.stop()
            raise RuntimeError(f"{sys.executable} cannot run {program}")

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def ask(self, request: bytes, seconds: float) -> dict[str, str] | None:
        """Returns the answer to a line; `None` if the process died or took longer than `seconds`."""
        assert self._process.stdin is not None
        unsent = memoryview(request)
        try:
            while unsent:
                unsent = unsent[self._process.stdin.write(unsent) :]
        except BrokenPipeError:
            return None
        line = self._read_line(seconds)
        return None if line is None else json.loads(line)

    def _read_line(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        line = bytearray()
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(1000 * remaining):
                return None
            piece = os.read(descriptor, 2**20)
            if not piece:
                return None
            line += piece
        return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
