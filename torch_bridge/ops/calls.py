"""Calls of `pallas_kernels` ops through JAX on memory shared with torch, in stream order.

Each call has an argument imported from torch's current stream, so JAX's program runs after torch's queued work. Its
results are exported to that stream, so torch's later work runs after JAX's program. The host never waits.
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
    """Runs an op of `pallas_kernels` on arrays and returns its result.

    Args:
        op: the op's name.
        *arrays: its positional array arguments, `None` for an absent optional one.
        donate: number of leading arguments that are donated.
        **options: its keyword arguments; arrays are traced, all other values are static.
    """
    static = tuple((name, value) for name, value in options.items() if not _is_array(value))
    named = {name: value for name, value in options.items() if _is_array(value)}
    return call(_program(op, donate, static), *arrays, **named)


def call(program: Callable[..., Any], *arrays: Any, **named: Any) -> Any:  # noqa: ANN401
    """Calls a jitted program of arrays; results of earlier calls that torch has dropped are released.

    Args:
        program: the program.
        *arrays: its positional arguments; one at least was imported from torch's current stream.
        **named: its keyword arguments.
    """
    # The kernels that read the dropped results were queued before this call, which runs after them.
    kept: list[tuple[StorageWeakRef, jax.Array]] = []
    dropped: list[tuple[StorageWeakRef, jax.Array]] = []
    with _LENT_LOCK:
        for lent in _LENT:
            (dropped if lent[0].expired() else kept).append(lent)
        _LENT[:] = kept
    first = jax.tree.leaves(arrays)[0]
    with _computing_on(next(iter(first.devices()))):
        result = program(*arrays, **named)
    dropped.clear()
    return result


def hand_out(array: jax.Array) -> torch.Tensor:
    """Returns a result as a tensor.

    When torch drops the tensor, torch's queued kernels may still read the memory, and JAX does not track them. So the
    array is kept until a later call that is ordered after those kernels.
    """
    tensor = to_torch(array)
    if _is_asynchronous(tensor):
        with _LENT_LOCK:
            _LENT.append((StorageWeakRef(tensor.untyped_storage()), array))
    return tensor


def _is_asynchronous(tensor: torch.Tensor) -> bool:
    """Returns whether torch reads a tensor asynchronously to the host."""
    return tensor.is_cuda


@cache
def _program(op: str, donate: int, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    function = partial(getattr(pallas_kernels, op), **dict(static))
    return jax.jit(function, donate_argnums=tuple(range(donate)))


def _is_array(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, jax.Array)


def _computing_on(device: jax.Device) -> AbstractContextManager[Any]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns a context in which ops choose their implementation for the device of their arrays."""
    return nullcontext() if device == get_default_device() else jax.default_device(device)
