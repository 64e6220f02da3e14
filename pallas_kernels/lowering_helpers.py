"""Processes that lower and compile kernels for the process that compiles programs.

Mosaic generates a kernel in Python, which takes 0.2 to 4 seconds, and threads of one process would take turns. It also
compiles one kernel of a process at a time. Most of the time to build programs for the first time is that of their
kernels. These are known as soon as the programs are traced (`pallas_kernels.deferred`), and each can be lowered and
compiled alone, without a GPU.
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
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib._jax import Device

from pallas_kernels.deferred import Instance, instances, module_of
from pallas_kernels.device import HOPPER, described_gpu, gpu_arch
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

_COMPILES = jax.__version_info__[:2] >= (0, 12)
"""Whether a program that is loaded brings its compiled kernels along; under JAX 0.11 these are compiled again."""

_PROGRAM = "import pallas_kernels.lowering_helpers as helpers; helpers.serve()"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class LoweringHelpers:
    """Lowers and compiles kernels of traced programs in other processes, inside a `with` block.

    Each is a process of its own, and no copy of this one, which JAX's threads forbid. It runs the same sources under
    the same settings of JAX. What it cannot lower is lowered by this process, as without helpers; a warning says why.

    Mosaic keeps the kernels of this process by a hash of their code. So it compiles none again that is in a program
    which this process has loaded, and each helper returns its kernel as such a program too.
    """

    def __init__(self, most: int | None = None) -> None:
        """Starts nothing.

        Args:
            most: most processes; by default as many as the cores that this process may use, but for two, and at most
                12.
        """
        self._most = min(_MOST, _cores() - _OWN_CORES) if most is None else most
        self._lowered: dict[Instance, Future[bytes]] = {}
        self._waiting: SimpleQueue[tuple[Future[bytes], bytes] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loaded: list[jax.stages.Compiled] = []
        self._failures: list[str] = []
        self._is_closed = False

    def __enter__(self) -> "LoweringHelpers":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        for _thread in self._threads:
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
                self._failures.append(f"{instance.name}: {str(error) or 'it took too long'}")

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
                        answer: _Answer = ask(task)
                        self._load(answer)
                        if answer.module is None:
                            raise RuntimeError(answer.error)
                        future.set_result(answer.module)
                    except (OSError, EOFError, pickle.UnpicklingError):
                        future.set_exception(RuntimeError("its process ended"))
                        return
                    # Whatever it is, nobody may wait for this kernel, which the process itself can lower.
                    except Exception as error:
                        future.set_exception(RuntimeError(str(error) or repr(error)))
        except Exception as error:
            if not self._is_closed:
                self._failures.append(f"no process could be started: {str(error) or 'it ended'}")

    def _load(self, answer: "_Answer") -> None:
        """Loads the program of a kernel, if this process has a GPU."""
        if answer.module is not None and answer.error:
            self._failures.append(f"a kernel was lowered alone: {answer.error}")
        device = _gpu()
        if answer.compiled is None or device is None:
            return
        try:
            self._loaded.append(answer.compiled.load(device))
        except Exception as error:
            self._failures.append(f"a compiled kernel cannot be loaded: {error}")

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


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu() -> Device | None:
    device = jax.devices()[0]
    return device if device.platform == "gpu" else None


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


@dataclass(frozen=True)
class _Compiled:
    """A compiled program of one kernel.

    Attributes:
        program: the bytes of `serialize_executable`.
        operands: number of operands.
        results: number of results.
    """

    program: bytes
    operands: int
    results: int

    def load(self, device: Device) -> jax.stages.Compiled:
        return serialize_executable.deserialize_and_load(
            self.program,
            jax.tree.structure(((0,) * self.operands, {})),
            jax.tree.structure([0] * self.results),
            backend=device.client,
            execution_devices=[device],
        )


@dataclass(frozen=True)
class _Answer:
    """What a process makes of a kernel.

    Attributes:
        module: it, lowered; `None` if that failed.
        compiled: it, compiled; `None` where no kernel is, or if that failed.
        error: why it was not lowered, or not compiled; empty where neither has failed.
    """

    module: bytes | None = None
    compiled: _Compiled | None = None
    error: str = ""


def serve() -> None:
    """Runs in the other process: takes the settings, then kernels until there are no more, and answers each.

    The first answer is the hash of the sources, and those that follow are `_Answer`.
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
    # A kernel alone is no program that a later process could use.
    jax.config.update("jax_enable_compilation_cache", False)
    answer(kernel_sources())
    with quick_lowering():
        while True:
            try:
                packed = pickle.load(given)
            except EOFError:
                return
            answer(_answer(packed))


def _answer(packed: bytes) -> _Answer:
    try:
        instance: Instance = pickle.loads(packed)
        if not instance.kernel.is_as_described():
            return _Answer(error="another process makes another kernel of it")
        device = _described() if instance.platforms == ("cuda",) else None
        if device is None:
            return _Answer(instance.lowered())
        with jax.default_device(device):
            lowered = instance.lower()
            return _compiled(instance, lowered)
    except Exception as error:
        return _Answer(error=repr(error))


def _compiled(instance: Instance, lowered: jax.stages.Lowered) -> _Answer:
    module = module_of(lowered)
    try:
        program, *_ = serialize_executable.serialize(lowered.compile())
    except Exception as error:
        return _Answer(module, error=repr(error))
    results = len(jax.tree.leaves(lowered.out_info))
    return _Answer(module, _Compiled(program, len(instance.operands), results))


@cache
def _described() -> Device | None:
    """Returns the device to compile for, or `None` if only a process with a GPU can."""
    try:
        return described_gpu() if _COMPILES else None
    except (RuntimeError, ValueError):
        return None
