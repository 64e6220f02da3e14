"""Processes that lower kernels for the process that compiles programs.

Mosaic generates a kernel in Python, which takes 0.2 to 4 seconds, and threads of one process would take turns. The
kernels of programs that are compiled for the first time are nearly all of the time to lower these. They are known as
soon as the programs are traced (`pallas_kernels.deferred`), and each can be lowered alone, without a GPU.
"""

import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import jax

from pallas_kernels.deferred import Instance, instances
from pallas_kernels.device import HOPPER, gpu_arch
from pallas_kernels.lowering import quick_lowering
from pallas_kernels.sources import kernel_sources

_LOG = logging.getLogger(__name__)

_MOST = 12
"""Most processes; the longest kernel takes as long as the share of each of that many."""

_KERNELS_EACH = 4
"""Kernels that a process must have to do, which takes as long to start as it takes to lower a few."""

_OWN_CORES = 2
"""Cores that are left to the process that compiles."""

_LONGEST = 120.0
"""Seconds after which a kernel is no longer waited for."""

_PROGRAM = "import pallas_kernels.lowering_helpers as helpers; helpers.serve()"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class LoweringHelpers:
    """Lowers kernels of traced programs in other processes, inside a `with` block.

    Each is a process of its own, and no copy of this one, which JAX's threads forbid. It runs the same sources under
    the same settings of JAX. What it cannot lower is lowered by this process, as without helpers; a warning says why.
    """

    def __init__(self, most: int | None = None) -> None:
        """Starts nothing.

        Args:
            most: most processes; by default as many as the cores that this process may use, but for two, and at most
                12.
        """
        cores = len(os.sched_getaffinity(0))
        self._most = min(_MOST, cores - _OWN_CORES) if most is None else most
        self._lowered: dict[Instance, Future[bytes]] = {}
        self._waiting: SimpleQueue[tuple[Future[bytes], bytes] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failures: list[str] = []
        self._is_closed = False

    def __enter__(self) -> "LoweringHelpers":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put(None)
        for process in list(self._processes):
            process.kill()
        for thread in self._threads:
            thread.join()
        if self._failures:
            _LOG.warning(
                "programs start later, since processes that lower kernels failed: %s",
                "; ".join(dict.fromkeys(self._failures)),
            )

    def request(self, traced: jax.stages.Traced, platforms: tuple[str, ...]) -> None:
        """Starts to lower the kernels of a program that this process has not lowered, and returns at once.

        Args:
            traced: the program's trace.
            platforms: what it will be lowered for.
        """
        # Where there is no GPU, Mosaic lowers for Hopper.
        if self._most < 1 or gpu_arch() not in (None, HOPPER):
            return
        for instance in instances(traced.jaxpr.jaxpr, platforms):
            if instance in self._lowered or instance.is_lowered:
                continue
            task = _packed(instance)
            if task is None:
                continue
            future: Future[bytes] = Future()
            self._lowered[instance] = future
            self._waiting.put((future, task))
            if len(self._lowered) >= _KERNELS_EACH * (len(self._threads) + 1):
                self._start()

    def collect(self, traced: jax.stages.Traced, platforms: tuple[str, ...]) -> None:
        """Waits for the kernels of a program that are being lowered; those that no process has begun are left."""
        for instance in instances(traced.jaxpr.jaxpr, platforms):
            future = self._lowered.get(instance)
            if future is None or instance.is_lowered or future.cancel():
                continue
            try:
                instance.keep(future.result(_LONGEST))
            except (RuntimeError, TimeoutError) as error:
                self._failures.append(f"{instance.name}: {error or 'it took too long'}")

    def _start(self) -> None:
        if len(self._threads) < self._most:
            settings = _settings()
            thread = threading.Thread(target=self._feed, args=(settings,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _feed(self, settings: dict[str, Any]) -> None:
        """Gives one process the kernels that wait, one after another."""
        try:
            with self._process(settings) as ask:
                while (entry := self._waiting.get()) is not None:
                    future, task = entry
                    if not future.set_running_or_notify_cancel():
                        continue
                    try:
                        module, error = ask(task)
                    except (OSError, EOFError, pickle.UnpicklingError):
                        future.set_exception(RuntimeError("its process ended"))
                        return
                    if error is None:
                        future.set_result(module)
                    else:
                        future.set_exception(RuntimeError(error))
        except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
            if not self._is_closed:
                self._failures.append(f"no process could be started: {error or 'it ended'}")

    @contextmanager
    def _process(self, settings: dict[str, Any]) -> Iterator[Callable[[Any], Any]]:
        """Runs a process; yields a function that returns its answer.

        Raises:
            OSError, EOFError: it did not start, or ended.
            RuntimeError: it runs other sources than this process.
        """
        paths = [path or os.getcwd() for path in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._processes.append(process)
        given, answers = process.stdin, process.stdout
        assert given is not None
        assert answers is not None

        def ask(message: Any) -> Any:  # noqa: ANN401 - what `serve` takes and returns
            pickle.dump(message, given)
            given.flush()
            return pickle.load(answers)

        try:
            if self._is_closed:
                return
            if ask(settings) != kernel_sources():
                raise RuntimeError("files of pallas_kernels have changed since they were imported")
            yield ask
        finally:
            process.kill()
            process.wait()
            answers.close()
            try:
                given.close()
            except OSError:
                _LOG.debug("a process ended with something unread")


def _packed(instance: Instance) -> bytes | None:
    """Returns the bytes of a kernel for another process, or `None` if that could not make the same kernel of them."""
    try:
        packed = pickle.dumps(instance)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    # The main module of the other process is another one.
    return None if b"__main__" in packed else packed


def _settings() -> dict[str, Any]:
    """Returns JAX's settings by name, but for the platforms and those that are objects of this process."""
    found = {
        name: getattr(jax.config, name, default) for name, default in jax.config.values.items()
    }
    del found["jax_platforms"]
    plain = bool | int | float | str | None
    return {name: value for name, value in found.items() if isinstance(value, plain)}


def serve() -> None:
    """Runs in the other process: takes the settings, then kernels until there are no more, and answers each.

    The answers are the hash of the sources, then for each kernel its module and `None`, or `None` and an error.
    """
    given, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What a library prints is no answer.
    os.dup2(2, 1)
    gc.disable()

    def answer(message: object) -> None:
        pickle.dump(message, answers)
        answers.flush()

    for name, value in pickle.load(given).items():
        if getattr(jax.config, name, jax.config.values.get(name)) != value:
            jax.config.update(name, value)
    answer(kernel_sources())
    with quick_lowering():
        while True:
            try:
                packed = pickle.load(given)
            except EOFError:
                return
            answer(_answer(packed))


def _answer(packed: bytes) -> tuple[bytes | None, str | None]:
    try:
        instance: Instance = pickle.loads(packed)
        if not instance.kernel.is_as_described():
            return None, "another process makes another kernel of it"
        return instance.lowered(), None
    except Exception as error:
        return None, repr(error)
