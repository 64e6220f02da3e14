"""Torch inside a jitted JAX program: a function of tensors runs as one operation of the program, on XLA's buffers.

The function runs in XLA's stream order, so no fence is needed, and arrays that it updates in place stay donated. It
costs one call into Python per run, unless the program's CUDA graph records it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import torch
from jax import ShapeDtypeStruct
from jax.experimental.buffer_callback import buffer_callback
from torch.multiprocessing.reductions import StorageWeakRef

from torch_bridge.errors import LeaseLeaked
from torch_bridge.sharing.dlpack import as_bytes

_CPU = 1
"""DLPack's device type of CPUs."""


def torch_function(
    function: Callable[..., None],
    results: ShapeDtypeStruct | Sequence[ShapeDtypeStruct] = (),
    *,
    in_place: Sequence[int] = (),
    captured: bool = False,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function of arrays, to be used under `jax.jit`, that runs a function of tensors.

    Args:
        function: called as `function(*outs, *tensors)`. It must write every result into its `out`, may also write to
            the tensors in `in_place`, and must not keep a reference to any tensor. 8-bit floats are passed as uint8.
        results: shapes and dtypes of the outs.
        in_place: positions of arguments that the function updates in place. They are returned after the results. Donate
            them to the jitted function, or XLA copies them first.
        captured: whether the program's CUDA graph records the function's launches, so that Python is called only once.
            The function must then do the same at each run, allocate nothing and not wait for the device.

    Returns:
        A function that returns a tuple: the results, then the updated arguments.

    Raises:
        ValueError: `in_place` names a position without an argument.
        LeaseLeaked: (as part of a `JaxRuntimeError`) the function kept a view of a buffer, which XLA will reuse.
    """
    wanted = (results,) if isinstance(results, ShapeDtypeStruct) else tuple(results)

    def run(ctx: Any, outs: Sequence[Any], *buffers: Any) -> None:  # noqa: ANN401
        fresh = list(outs[: len(wanted)])
        given = (*fresh, *buffers)
        with torch.no_grad(), _on_stream(ctx, given):
            tensors = [as_bytes(torch.from_dlpack(buffer)) for buffer in given]
            storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            function(*tensors)
            del tensors
        if not all(storage.expired() for storage in storages):
            raise LeaseLeaked(
                f"{function} kept a tensor of a JAX program, whose memory XLA will reuse; keep a clone instead"
            )

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        unknown = [index for index in in_place if not 0 <= index < len(arrays)]
        if unknown:
            raise ValueError(
                f"in_place names {unknown} of {len(arrays)} arguments; give positions from 0 to {len(arrays) - 1}"
            )
        updated = [ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in in_place]
        out = buffer_callback(
            run,
            (*wanted, *updated),
            input_output_aliases={index: len(wanted) + i for i, index in enumerate(in_place)},
            command_buffer_compatible=captured,
        )(*arrays)
        return tuple(out)

    return call


def torch_layer(
    module: torch.nn.Module, result: ShapeDtypeStruct | None = None
) -> Callable[..., jax.Array]:
    """Returns a torch module as a function of arrays, for a layer of a jitted step. Its weights stay in torch.

    Args:
        module: a module of tensors that returns one tensor.
        result: shape and dtype of the result; `None` for those of the first argument.
    """

    def write(out: torch.Tensor, *tensors: torch.Tensor) -> None:
        out.copy_(module(*tensors))

    def call(*arrays: jax.Array) -> jax.Array:
        like = result or ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
        return torch_function(write, like)(*arrays)[0]

    return call


def why_not_captured() -> str | None:
    """Returns why `captured=True` has no effect here, or `None` if it has one; it runs a small program to find out."""
    if jax.default_backend() != "gpu":
        return f"JAX computes on {jax.default_backend()}, which has no CUDA graphs"
    calls = 0

    def double(out: torch.Tensor, tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        torch.add(tensor, tensor, out=out)

    x = jax.numpy.ones(256)
    once = torch_function(double, ShapeDtypeStruct(x.shape, x.dtype), captured=True)
    length, runs = 8, 6
    program = jax.jit(lambda x: [x := once(x)[0] for _ in range(length)][-1])
    for _ in range(runs):
        program(x).block_until_ready()
    if calls < length * runs:
        return None
    return f"XLA called Python {calls} times in {runs} runs of {length} calls, so its graph did not record them"


def _on_stream(ctx: Any, buffers: Sequence[Any]) -> Any:  # noqa: ANN401 - a context of torch
    """Returns a context in which torch launches on XLA's stream."""
    kind, index = buffers[0].__dlpack_device__() if buffers else (_CPU, 0)
    if kind == _CPU:
        return nullcontext()
    device = torch.device("cuda", index)
    return torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream, device=device))
