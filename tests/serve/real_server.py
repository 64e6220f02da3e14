"""`jaxkv serve` as a user starts it: two processes of their own, the small model, a real socket."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
SMALL = [
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--page-size",
    "16",
    "--token-budget",
    "64",
]
_READY = re.compile(r"^serving (\S+) at (http://\S+) \(ready\)$", re.MULTILINE)
_SECONDS = 120


class RealServer:
    """A running server.

    Args:
        folder: for its output.
        options: of the command, beside those that keep it small.
        fault: see `tests.serve.faulty_engine`; `None` for the real engine program.
        environment: more variables.
        log: file descriptor for stderr; `None` for a file.

    Attributes:
        url: its address, once it is ready.
    """

    def __init__(self, folder, *options, fault=None, port=0, environment=None, log=None):
        self._out, self._err = folder / "out", folder / "err"
        self._begun = len(self.out) if self._out.exists() else 0
        program = "jaxkv.cli" if fault is None else "tests.serve.faulty_server"
        with self._out.open("a") as out, self._err.open("a") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, "serve", "--port", str(port), *SMALL, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if log is None else log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                    "FAULT": fault or "none",
                    **(environment or {}),
                },
            )

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    @property
    def pid(self):
        """The HTTP process's id."""
        return self.process.pid

    @property
    def engine_pid(self):
        """The engine process's id."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def wait_ready(self):
        """Waits until it serves; returns itself."""
        wait_for(lambda: _READY.search(self.out[self._begun :]) or self.process.poll() is not None)
        found = _READY.search(self.out[self._begun :])
        assert found, f"the server ended with {self.process.poll()}: {self.err}"
        self.url = found[2]
        self.port = int(self.url.rpartition(":")[2])
        return self

    def status(self, path):
        """Returns the status of a GET."""
        return httpx.get(self.url + path, timeout=30).status_code

    def complete(self, prompt, **fields):
        """Returns the reply to a completion."""
        return httpx.post(f"{self.url}/v1/completions", json=body(prompt, **fields), timeout=120)

    def stream(self, prompt, **fields):
        """Yields the texts of a stream; "error" if an error event comes, "cut" if the connection ends early."""
        given = body(prompt, stream=True, **fields)
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=given, timeout=120
            ) as reply:
                if reply.status_code != 200:
                    yield f"status {reply.status_code}"
                    return
                yield from texts_of(reply.iter_lines())
        except httpx.TransportError:
            yield "cut"

    def wait_end(self):
        """Waits until both processes have ended; returns the exit code."""
        return self.process.wait(_SECONDS)

    def close(self):
        """Ends it if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def texts_of(lines):
    """Yields the texts of server-sent events."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            yield "error"
            return
        for choice in event["choices"]:
            yield choice["text"]
    yield "cut"


def body(prompt, **fields):
    """Returns a completion's body; it never ends before `max_tokens`, unless asked to."""
    return {
        "model": "default",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
        **fields,
    }


@contextlib.contextmanager
def real_server(folder, *options, **given):
    """Yields a server that is ready, and ends it."""
    server = RealServer(folder, *options, **given)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_for(what):
    """Waits until a condition holds; fails after minutes."""
    latest = time.monotonic() + _SECONDS
    while not what():
        assert time.monotonic() < latest, "waited in vain"
        time.sleep(0.05)


def kill(pid, number=signal.SIGKILL):
    """Sends a signal to a process."""
    os.kill(pid, number)
