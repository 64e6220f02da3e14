"""Free memory, JAX's pool of it, `OutOfMemory` errors that name the options to change, and the garbage collector."""

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import jax
import numpy as np

from jaxkv.errors import OutOfMemory

REMEDY = (
    "use a narrower dtype, a smaller max_model_len, or a CacheConfig with a smaller max_sequences or budget_bytes, "
    "or free memory that other programs use"
)

_POOL_SHARE = 0.75
"""Share of a GPU's memory that JAX takes for its pool by default."""

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "Out of memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that memory ran out.

    A retry may succeed, because other programs free memory, and so may a smaller step.
    """
    told = f"{error} {error.__cause__ or ''}"
    return isinstance(error, MemoryError) or any(sign in told for sign in _OUT_OF_MEMORY)


@contextmanager
def named_exhaustion(doing: str) -> Iterator[None]:
    """Replaces out-of-memory errors inside the block by an `OutOfMemory` that names the options to change.

    Args:
        doing: the work of the block for the message, such as "loading the weights".

    Raises:
        OutOfMemory: memory ran out inside the block. Any other error passes through.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # The frames of the traceback keep earlier allocations alive.
        cause = error.with_traceback(None)
    else:
        return
    told = " ".join(str(cause).split())[:200]
    raise OutOfMemory(f"out of memory while {doing} ({told}); {REMEDY}") from cause


def device_bytes() -> int | None:
    """Returns the free bytes of this process's first device, on a CPU `host_bytes()`; `None` if it reports none."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return host_bytes()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def outside_bytes(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the bytes of this process's first GPU that JAX leaves out of its pool; `None` if it reports none.

    They hold the driver's own memory, CUDA graphs, and what sums over several GPUs keep.

    Args:
        environment: has `XLA_PYTHON_CLIENT_MEM_FRACTION`, the share of a GPU's memory that the pool may take.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    share = float(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or _POOL_SHARE)
    return int(stats["bytes_limit"] * (1 - share) / share) if "bytes_limit" in stats else None


def host_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process may use: the machine's, or less by a control group's limit.

    Limits of enclosing groups count too, of version 1 and 2, as far as a container shows them.

    Args:
        root: root of the file system.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _group_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # Without a limit the file is missing, or holds "max".
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
        with suppress(OSError):
            limits += _hierarchical_limits((folder / "memory.stat").read_text())
    return min(limit for limit in limits if limit > 0)


def _group_folders(root: Path) -> Iterator[Path]:
    """Yields the folders of the memory groups that this process is in, the innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's, which does not exist there; its own group is then the mount.
        inner = [] if ".." in group.parts else [group, *group.parents]
        yield from (mount / folder for folder in inner)
        yield mount


def _hierarchical_limits(stat: str) -> Iterator[int]:
    """Yields the limit that a group of version 1 has by itself or by groups around it."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name == "hierarchical_memory_limit":
            yield int(value)


def start_devices() -> None:
    """Initialises the devices, and takes JAX's pool of memory on one of them in a thread, while Python goes on.

    A GPU's first array takes two seconds, mostly for the pool. If that fails, the next array fails likewise.

    Raises:
        RuntimeError: the devices cannot be initialised.
    """
    # In this thread: JAX tells it once, and uses a CPU from then on.
    jax.devices()
    chosen = jax.config.jax_default_device

    def start() -> None:
        with jax.default_device(chosen), suppress(RuntimeError):
            jax.block_until_ready(jax.device_put(np.zeros(1, np.int8)))

    # Not a daemon: a process that ends while XLA works in such a thread is aborted.
    threading.Thread(target=start, name="jaxkv-devices").start()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns Python's garbage collector off inside the block; it runs again afterwards if it did before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Lets Python's garbage collector ignore inside the block what exists at its begin, as in a server.

    A look at all that the traces of programs have left takes some 0.2 seconds, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
