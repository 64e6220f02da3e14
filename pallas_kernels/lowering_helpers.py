"""Processes that lower and compile kernels for the process that compiles programs.

Mosaic generates a kernel in Python, which takes 0.2 to 4 seconds, and threads of one process would take turns. Mosaic
also compiles one kernel of a process at a time. Most of the time to build programs for the first time is that of their
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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.extend.backend import get_default_device
from jaxlib._jax import Device

from pallas_kernels.deferred import Instance, instances, module_of
from pallas_kernels.device import HOPPER, described_gpu, gpu_arch
from pallas_kernels.lowering import quick_lowering
from pallas_kernels.sources import kernel_sources

_LOG = logging.getLogger(__name__)

_MOST = 12
"""Most processes. With more, the longest kernel alone would take longer than the share of one process."""

_KERNELS_EACH = 4
"""Kernels for each process. A process takes as long to start as to lower a few kernels."""

_OWN_CORES = 2
"""Cores that are left to the process that compiles."""

_LONGEST = 120.0
"""Seconds after which a kernel that a process has begun is no longer waited for."""

_MEMORY_EACH = 2**30
"""Bytes of host memory for each process, of which 0.7 GB were seen in use."""

_COMPILES = jax.__version_info__[:2] >= (0, 12)
"""Whether a program that is loaded brings its compiled kernels along; under JAX 0.11 these are compiled again."""

_PROGRAM = "import pallas_kernels.lowering_helpers as helpers; helpers.serve()"
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "JAX_PLATFORM_NAME": "",
    "CUDA_VISIBLE_DEVICES": "",
}
# Settings that name a backend or a device of this process.
_OF_DEVICES = (
    "jax_platforms",
    "jax_platform_name",
    "jax_xla_backend",
    "jax_backend_target",
    "jax_default_device",
)
_CGROUP = Path("/sys/fs/cgroup")


class LoweringHelpers:
    """Lowers and compiles kernels of traced programs in other processes, inside a `with` block.

    Each is a process of its own, and no copy of this one, which JAX's threads forbid. It runs the same sources under
    the same settings of JAX. What it cannot lower is lowered by this process, as without helpers; a warning says why.

    Mosaic keeps the compiled kernels of this process by a hash of their code, also those of programs that were loaded.
    So each helper returns its kernel as a program too, and Mosaic does not compile that kernel again.
    """

    def __init__(self, most: int | None = None) -> None:
        """Starts nothing.

        Args:
            most: most processes; by default as many as the cores that this process may use, but for two, as there is
                memory for, and at most 12.
        """
        found = min(_MOST, _cores() - _OWN_CORES, _memory() // _MEMORY_EACH)
        self._most = found if most is None else most
        self._lowered: dict[Instance, Future[bytes]] = {}
        self._kernels: dict[jax.stages.Traced, tuple[Instance, ...]] = {}
        self._waiting: SimpleQueue[tuple[Future[bytes], bytes] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._begun: dict[Future[bytes], float] = {}
        self._loaded: list[jax.stages.Compiled] = []
        self._failures: list[str] = []
        self._is_closed = False

    def __enter__(self) -> "LoweringHelpers":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self.end()
        for process in list(self._processes):
            process.kill()
        for thread in self._threads:
            thread.join()
        if self._failures:
            _LOG.warning(
                "programs start later, since processes that lower kernels failed: %s",
                "; ".join(dict.fromkeys(self._failures)),
            )

    def end(self) -> None:
        """Lets each process end after the kernels that wait; what they have compiled stays until the block ends."""
        for _thread in self._threads:
            self._waiting.put(None)

    def request(self, traced: jax.stages.Traced, platforms: tuple[str, ...]) -> bool:
        """Starts to lower the kernels of a program that this process has not lowered, and returns at once.

        Args:
            traced: the program's trace.
            platforms: what it will be lowered for.

        Returns:
            Whether a process may lower some of them.
        """
        # Where there is no GPU, Mosaic lowers for Hopper.
        if self._most < 1 or gpu_arch() not in (None, HOPPER):
            return False
        are_asked_for = False
        self._kernels[traced] = tuple(instances(traced.jaxpr.jaxpr, platforms))
        for instance in self._kernels[traced]:
            are_asked_for |= instance in self._lowered
            if instance in self._lowered or instance.is_lowered:
                continue
            task = _packed(instance)
            if task is None:
                continue
            future: Future[bytes] = Future()
            self._lowered[instance] = future
            self._waiting.put((future, task))
            are_asked_for = True
            if len(self._lowered) >= _KERNELS_EACH * (len(self._threads) + 1):
                self._start()
        return are_asked_for and bool(self._threads)

    def is_done(self, traced: jax.stages.Traced) -> bool:
        """Returns whether no kernel of a program that was asked for is still to be lowered by a process."""
        kernels = self._kernels.get(traced, ())
        return all(
            kernel not in self._lowered or self._lowered[kernel].done() for kernel in kernels
        )

    def collect(self, traced: jax.stages.Traced) -> None:
        """Waits for the kernels of a program that are being lowered; those that no process has begun are left."""
        for instance in self._kernels.pop(traced, ()):
            future = self._lowered.get(instance)
            if future is None or instance.is_lowered or future.cancel():
                continue
            # A future that cannot be cancelled has begun, perhaps in this moment.
            now = time.monotonic()
            try:
                instance.keep(future.result(self._begun.get(future, now) + _LONGEST - now))
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
                    self._begun[future] = time.monotonic()
                    try:
                        answer: _Answer = ask(task)
                    # Every error ends the wait. What follows in the pipe may be the rest of this answer.
                    except Exception as error:
                        future.set_exception(RuntimeError(str(error)))
                        return
                    self._load(answer)
                    if answer.module is None:
                        future.set_exception(RuntimeError(answer.error))
                    else:
                        future.set_result(answer.module)
        except Exception as error:
            if not self._is_closed:
                self._failures.append(f"no process could be started: {error}")

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
            OSError: it did not start.
            RuntimeError: it ended, or runs other sources than this process.
        """
        paths = [path or os.getcwd() for path in sys.path]
        with TemporaryFile() as errors:
            process = subprocess.Popen(
                # Without -P the working directory would come before these paths.
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
                # An interrupt of the terminal is for this process, which ends the others.
                start_new_session=True,
            )
            self._processes.append(process)
            given, answers = process.stdin, process.stdout
            assert given is not None
            assert answers is not None

            def ask(message: Any) -> Any:  # noqa: ANN401 - what `serve` takes and returns
                try:
                    pickle.dump(message, given)
                    given.flush()
                    return pickle.load(answers)
                except (OSError, EOFError) as error:
                    errors.seek(0)
                    *_, last = [b"", *errors.read().splitlines()]
                    raise RuntimeError(
                        f"a process ended: {last.decode(errors='replace') or process.wait(1)}"
                    ) from error

            try:
                if self._is_closed:
                    return
                if ask(settings) != kernel_sources():
                    raise RuntimeError(
                        "files of pallas_kernels have changed since they were imported"
                    )
                yield ask
            finally:
                process.kill()
                process.wait()
                answers.close()
                with suppress(OSError):
                    given.close()


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    quota, *period = _limit("cpu.max").split() or ["max"]
    granted = int(quota) // int(period[0]) if quota.isdigit() and period else _MOST + _OWN_CORES
    return min(len(os.sched_getaffinity(0)), granted)


def _memory() -> int:
    """Returns the bytes of memory that this process and others beside it may have."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    granted = _limit("memory.max").strip()
    return min(most, int(granted)) if granted.isdigit() else most


def _limit(name: str) -> str:
    """Returns the text of a limit of a container, empty without one (control groups, version 2)."""
    try:
        return (_CGROUP / name).read_text()
    except OSError:
        return ""


def _gpu() -> Device | None:
    device = get_default_device()
    return device if device.platform == "gpu" else None


def _packed(instance: Instance) -> bytes | None:
    """Returns the bytes of a kernel for another process, or `None` if that could not make the same kernel of them."""
    try:
        packed = pickle.dumps(instance)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    # The main module of the other process is another one.
    return None if b"__main__" in packed else packed


def jax_settings() -> dict[str, Any]:
    """Returns JAX's settings by name, as this thread has them: inside of contexts such as `jax.enable_x64`."""
    return {name: getattr(jax.config, name, default) for name, default in jax.config.values.items()}


def _settings() -> dict[str, Any]:
    """Returns JAX's settings by name, but for those of devices and those that are objects of this process."""
    plain = bool | int | float | str | None
    return {
        name: value
        for name, value in jax_settings().items()
        if isinstance(value, plain) and name not in _OF_DEVICES
    }


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
