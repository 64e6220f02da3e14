"""Direct launches of Mosaic kernels by torch, on its current stream and pointers, without XLA.

`plgpu.as_torch_kernel` does the same on the default stream only, and checks pytrees, shapes and dtypes at each launch.
So this file uses its compiler with its own launch code. JAX does not track these launches.
"""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import torch
from jax._src.lib.mlir.dialects import hlo
from jax.experimental.mosaic.gpu import core

_HAS_KERNEL = getattr(core, "_ABI_V2", False)
"""Whether the C function that launches takes (kernel, function, stream, pointers, device), as from jaxlib 0.12 on,
instead of (function, stream, pointers)."""

_CLOSED_OVER = {"function", "launch_c", "torch"} | (
    {"kernel"} if hasattr(core, "_ABI_V2") else set()
)
"""Free variables of JAX's launch function: the loaded kernel, the C function that launches it, and torch."""


@dataclass(frozen=True)
class Lowered:
    """A kernel as JAX lowers it; its parameters are the function's arguments in order, then its results.

    Attributes:
        module: the serialised MLIR module.
        in_place: for each result, the index of the argument that it aliases; empty if all results are new buffers.
    """

    module: bytes
    in_place: tuple[int, ...]


class Launch:
    """A loaded kernel for contiguous, aligned tensors of certain shapes and dtypes on one device.

    Args:
        kernel: the lowered kernel.
        out: shapes and dtypes of its results; empty for a kernel that only writes into its arguments.
        device: torch's current device.
    """

    def __init__(
        self, kernel: Lowered, out: Sequence[jax.ShapeDtypeStruct], device: torch.device
    ) -> None:
        # The kernel is never unloaded, since a CUDA graph may launch it until the process ends.
        launch, _ = core._compile_as_torch_gpu_kernel(kernel.module)
        inner = inspect.getclosurevars(launch).nonlocals
        loaded = [inner["function"]]
        self._last: tuple[int, ...] = ()
        if _HAS_KERNEL:
            loaded, self._last = [inner["kernel"], *loaded], (device.index,)
        self._launch = partial(inner["launch_c"], *loaded)
        self._in_place = kernel.in_place
        self._device, self._index = device, device.index
        self._out = [(one.shape, getattr(torch, one.dtype.name)) for one in out]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Queues the kernel on torch's current stream and returns its results. Arguments are not checked."""
        out = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._out]
        pointers = [tensor.data_ptr() for tensor in tensors]
        pointers += [pointers[index] for index in self._in_place]
        pointers += [tensor.data_ptr() for tensor in out]
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        # The launch copies the kernel's parameters, so the array of pointers may be freed afterwards.
        self._launch(stream, (ctypes.c_void_p * len(pointers))(*pointers), *self._last)
        return out


@cache
def why_not_launch() -> str | None:
    """Returns why this version of JAX cannot launch kernels without XLA, or `None` if it can."""
    make = getattr(core, "_compile_as_torch_gpu_kernel", None)
    if make is None:
        return f"JAX {jax.__version__} has no compiler of Mosaic kernels for torch"
    inner = [code for code in make.__code__.co_consts if getattr(code, "co_name", "") == "launch"]
    if len(inner) != 1 or set(inner[0].co_freevars) != _CLOSED_OVER:
        return f"JAX {jax.__version__} launches kernels for torch in another way than 0.11.2 and 0.12.0.1"
    return None


def load(
    kernel: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct], device: torch.device
) -> Launch | None:
    """Compiles a function of arrays that only launches one kernel, for the current device.

    Returns `None` if the function has other operations, or if this version of JAX is not supported.

    Raises:
        RuntimeError: torch is recording a CUDA graph.
    """
    if why_not_launch() is not None:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel must be loaded, but torch is recording a CUDA graph; call the op once with tensors of these "
            "shapes before the capture"
        )
    lowered = lower_alone(kernel, structs)
    if lowered is None:
        return None
    out = () if lowered.in_place else jax.tree.leaves(jax.eval_shape(kernel, *structs))
    return Launch(lowered, out, device)


def lower_alone(
    kernel: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct]
) -> Lowered | None:
    """Returns the Mosaic kernel that a function launches, or `None` if the function has other operations.

    Args:
        kernel: a function of arrays.
        structs: shapes and dtypes of its arguments.
    """
    lowered = jax.jit(kernel).trace(*structs).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir()
    with module.context:
        (main,) = [op for op in module.body.operations if op.sym_name.value == "main"]
        (body,) = main.body.blocks
        first, *rest = body.operations
        if first.operation.name != "stablehlo.custom_call" or len(rest) != 1:
            return None
        call, end = first.operation, rest[0].operation
        if call.attributes["call_target_name"].value != "mosaic_gpu_v2":
            return None
        if list(call.operands) != list(body.arguments) or list(end.operands) != list(call.results):
            return None
        aliases = [hlo.OutputOperandAlias(alias) for alias in first.output_operand_aliases or ()]
        in_place = tuple(alias.operand_index for alias in aliases)
        results = [list(alias.output_tuple_indices) or [0] for alias in aliases]
        if aliases and results != [[index] for index in range(len(call.results))]:
            return None
        return Lowered(call.attributes["mhlo.backend_config"]["module"].value_bytes, in_place)
