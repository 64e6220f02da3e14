"""Calls of our ops from torch: compiled by JAX, run on shared memory, ordered between both sides' streams.

Each call brings something imported from torch's current stream, so that JAX runs after what torch has queued, and
its results are exported to that stream, so that torch goes on after JAX. The host waits for neither.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import torch
from jax.extend.backend import get_default_device
from torch.multiprocessing.reductions import StorageWeakRef

import pallas_kernels
from torch_bridge.sharing.dlpack import to_torch

_LENT: list[tuple[StorageWeakRef, jax.Array]] = []
_LENT_LOCK = threading.Lock()


def run(op: str, *arrays: Any, donate: int = 0, **options: Any) -> Any:  # noqa: ANN401 - the ops' own types
    """Runs an op of `pallas_kernels` on arrays, and returns what it returns.

    Args:
        op: its name.
        *arrays: its array arguments, in order, `None` where an optional one is left out.
        donate: how many of the first ones are donated.
        **options: its keyword arguments: numbers by value, arrays as they are.
    """
    static = tuple((name, value) for name, value in options.items() if not _is_array(value))
    named = {name: value for name, value in options.items() if _is_array(value)}
    # What torch has dropped by now, it has dropped before what this call will be ordered after.
    kept: list[tuple[StorageWeakRef, jax.Array]] = []
    dropped: list[tuple[StorageWeakRef, jax.Array]] = []
    with _LENT_LOCK:
        for lent in _LENT:
            (dropped if lent[0].expired() else kept).append(lent)
        _LENT[:] = kept
    first = jax.tree.leaves(arrays)[0]
    with _computing_on(next(iter(first.devices()))):
        result = _program(op, donate, static)(*arrays, **named)
    dropped.clear()
    return result


def hand_out(array: jax.Array) -> torch.Tensor:
    """Returns a result as a tensor.

    JAX knows nothing of torch's kernels that still read a tensor when it is dropped, so the memory is kept until
    another call runs after them.
    """
    tensor = to_torch(array)
    if _runs_behind(tensor):
        with _LENT_LOCK:
            _LENT.append((StorageWeakRef(tensor.untyped_storage()), array))
    return tensor


def _runs_behind(tensor: torch.Tensor) -> bool:
    """Whether the host goes on before torch has read a tensor."""
    return tensor.is_cuda


@cache
def _program(op: str, donate: int, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    function = partial(getattr(pallas_kernels, op), **dict(static))
    return jax.jit(function, donate_argnums=tuple(range(donate)))


def _is_array(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, jax.Array)


def _computing_on(device: jax.Device) -> AbstractContextManager[Any]:  # pyright: ignore[reportInvalidTypeForm]
    """Makes ops choose for the device that their arrays are on."""
    return nullcontext() if device == get_default_device() else jax.default_device(device)
