"""A Mosaic kernel of ours launched by torch: on its current stream, on its pointers, without XLA.

`plgpu.as_torch_kernel` does the same on the default stream alone, and looks at trees, shapes and dtypes at each launch.
So its compiler is used here, and the launch is our own. JAX knows nothing of such runs.
"""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import torch
from jax._src.lib.mlir.dialects import hlo
from jax.experimental.mosaic.gpu import core

_CLOSED_OVER = {"function", "launch_c"}
"""What JAX's own launch refers to: the loaded kernel, and the C function that is given it, a stream and pointers."""


@dataclass(frozen=True)
class Lowered:
    """A kernel as JAX lowers it, whose arguments are a function's own, in their order, and then its results.

    Attributes:
        module: its code.
        in_place: for each result, the argument that it is written into; empty for a kernel whose results are all new.
    """

    module: bytes
    in_place: tuple[int, ...]


class Launch:
    """A kernel loaded for tensors of certain shapes and dtypes, contiguous and aligned, on one device.

    Args:
        kernel: what is launched.
        out: shapes and dtypes of what it returns; empty for one that writes into its arguments alone.
        device: the current one.
    """

    def __init__(
        self, kernel: Lowered, out: Sequence[jax.ShapeDtypeStruct], device: torch.device
    ) -> None:
        # Never unloaded: a CUDA graph may launch it as long as the process lives.
        launch, _ = core._compile_as_torch_gpu_kernel(kernel.module)
        inner = inspect.getclosurevars(launch).nonlocals
        self._function, self._launch = inner["function"], inner["launch_c"]
        self._in_place = kernel.in_place
        self._device, self._index = device, device.index
        self._out = [(one.shape, getattr(torch, one.dtype.name)) for one in out]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Queues the kernel on torch's current stream and returns what it will write. Checks nothing."""
        out = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._out]
        pointers = [tensor.data_ptr() for tensor in tensors]
        pointers += [pointers[index] for index in self._in_place]
        pointers += [tensor.data_ptr() for tensor in out]
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        # The kernel's parameters are copied at the launch, so the array of pointers may go then.
        self._launch(self._function, stream, (ctypes.c_void_p * len(pointers))(*pointers))
        return out


@cache
def why_not_launch() -> str | None:
    """Returns why kernels cannot be launched without XLA by this JAX, or `None` if they can."""
    make = getattr(core, "_compile_as_torch_gpu_kernel", None)
    if make is None:
        return f"JAX {jax.__version__} has no compiler of Mosaic kernels for torch"
    inner = [code for code in make.__code__.co_consts if getattr(code, "co_name", "") == "launch"]
    if len(inner) != 1 or not set(inner[0].co_freevars) >= _CLOSED_OVER:
        return f"JAX {jax.__version__} launches kernels for torch in another way than 0.11.2"
    return None


def load(
    kernel: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct], device: torch.device
) -> Launch | None:
    """Compiles a function of arrays that launches one kernel and does nothing else, for the current device.

    Returns `None` if it does anything else, or if JAX's compiler for torch is another than the one that was tried.

    Raises:
        RuntimeError: torch is recording a CUDA graph.
    """
    if why_not_launch() is not None:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a kernel would be loaded while torch records a CUDA graph; call it once with tensors of these shapes "
            "before the capture"
        )
    lowered = lower_alone(kernel, structs)
    if lowered is None:
        return None
    out = () if lowered.in_place else jax.tree.leaves(jax.eval_shape(kernel, *structs))
    return Launch(lowered, out, device)


def lower_alone(
    kernel: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct]
) -> Lowered | None:
    """Returns the one Mosaic kernel that a function launches, or `None` if it does anything else.

    Args:
        kernel: a function of arrays.
        structs: their shapes and dtypes.
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
