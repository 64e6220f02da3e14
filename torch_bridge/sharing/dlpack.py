"""Zero-copy exchange of JAX arrays and torch tensors through DLPack; an exchange that needs a copy is refused.

Torch can write to the memory of a JAX array, and JAX does not notice. `leases.py` decides when torch may write.
"""

import math
from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import torch
from jax._src.lib import _jax
from torch.utils.dlpack import from_dlpack, to_dlpack

from torch_bridge.errors import NotZeroCopy

# Alignment in bytes that XLA's vector instructions require. A GPU tensor at a smaller offset can be imported, but its
# use fails.
_ALIGNMENT = {"cpu": 64, "cuda": 16}
_NARROWED = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
    torch.uint64: torch.uint32,
}
_BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_DLPACK_KIND = {"cpu": 1, "cuda": 2}
_PLATFORM = {"cpu": "cpu", "cuda": "gpu"}


def to_torch(array: jax.Array) -> torch.Tensor:
    """Returns a tensor in the array's own memory.

    Torch's current stream is ordered after the computation of the array; the host does not wait. The tensor is
    writable, and JAX does not notice writes. While the tensor or a view of it exists, the array cannot be donated.

    Raises:
        NotZeroCopy: the array is on several devices, or torch does not have its dtype.
    """
    return to_torch_all([array])[0]


def to_torch_all(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Does the same as `to_torch` for arrays on one device, with a single query of torch's stream."""
    if not arrays:
        return []
    stream = _stream_of_torch(arrays[0])
    # In inference_mode a tensor has no version counter, which read-only leases use to detect writes.
    with torch.inference_mode(False):
        return [_exported(array, stream) for array in arrays]


def _stream_of_torch(array: jax.Array) -> int | None:
    """Returns torch's current stream on the array's device for DLPack, where 1 is the legacy default stream."""
    device = torch_device(array)
    if device.type == "cpu":
        return None
    _refuse_capture()
    return torch.cuda.current_stream(device).cuda_stream or 1


def _exported(array: jax.Array, stream: int | None) -> torch.Tensor:
    try:
        # This is the function below `array.__dlpack__`, which would repeat the checks made here.
        # The shard is a new handle: a process whose exported array is deleted, while a tensor shares it, is aborted.
        shard = array.addressable_data(0)
        tensor = from_dlpack(_jax.buffer_to_dlpack_managed_tensor(shard, stream=stream))
    except (BufferError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise NotZeroCopy(
            f"torch cannot view {array.dtype}{list(array.shape)}: {error}. Store it as uint8"
        ) from error
    if tensor.data_ptr() != array.unsafe_buffer_pointer() and array.size:
        raise NotZeroCopy(f"torch copied {array.dtype}{list(array.shape)}, so nothing is shared")
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an 8-bit float tensor viewed as uint8, and any other tensor unchanged."""
    return tensor.view(torch.uint8) if str(tensor.dtype)[6:] in _BYTE_FLOATS else tensor


def from_torch(tensor: torch.Tensor, *, copy: bool = False) -> jax.Array:
    """Returns an array in the tensor's own memory, ordered after all work queued on torch's current stream.

    The host does not wait. A later write to the tensor changes an array that JAX assumes to be constant; import the
    tensor again after each write. Give the array to one owner only: on a GPU, a step to which the array is donated
    writes into the tensor.

    Args:
        tensor: a tensor on the CPU or on an NVIDIA GPU that JAX sees, too.
        copy: whether to copy if sharing is impossible. Then 64-bit dtypes are narrowed to 32 bits (integers must fit),
            other strides are made contiguous, and a tensor that requires gradients is detached.

    Raises:
        NotZeroCopy: the tensor cannot be shared, and `copy` is False; the message gives the reason.
        ValueError: 64-bit integers do not fit in 32 bits, or JAX does not see the device.
    """
    return from_torch_all([tensor], copy=copy)[0]


def from_torch_all(tensors: Sequence[torch.Tensor], *, copy: bool = False) -> list[jax.Array]:
    """Does the same as `from_torch` for tensors on one device, with a single ordering of streams."""
    ready = []
    for tensor in tensors:
        reason = why_not_zero_copy(tensor)
        if reason is not None and not copy:
            raise NotZeroCopy(f"{reason}; or give copy=True")
        ready.append(tensor if reason is None else _copied(tensor))
    if not ready:
        return []
    device = ready[0].device
    if any(tensor.device != device for tensor in ready):
        raise ValueError(
            f"tensors are on {sorted({str(t.device) for t in ready})}; move them to one device"
        )
    if device.type == "cpu":
        arrays = [_imported(tensor, None) for tensor in ready]
    else:
        _refuse_capture()
        # torch exports tensors from its current device only.
        with torch.cuda.device(device):
            stream = _after_torch(device)
            arrays = [_imported(tensor, stream) for tensor in ready]
    for tensor, array in zip(ready, arrays, strict=True):
        if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
            raise NotZeroCopy(f"JAX copied a {tensor.dtype} tensor of shape {list(tensor.shape)}")
    return arrays


def why_not_zero_copy(tensor: torch.Tensor) -> str | None:
    """Returns why JAX cannot use the tensor's memory as it is, or `None` if it can."""
    what = f"a {tensor.dtype} tensor of shape {list(tensor.shape)}"
    if tensor.device.type not in _ALIGNMENT:
        return f"{what} is on {tensor.device}, and JAX shares memory on cpu and cuda only; move it"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"{what} is not a plain dense one ({tensor.layout}); make it dense"
    if tensor.requires_grad:
        return f"{what} requires gradients, which JAX does not record; call .detach()"
    if tensor.is_conj() or tensor.is_neg():
        return f"{what} is conjugated or negated lazily; call .resolve_conj().resolve_neg()"
    if tensor.dtype in _NARROWED and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return f"JAX would copy {what} to 32 bits; cast it to {_NARROWED[tensor.dtype]} in torch"
    if not is_compact(tensor.shape, tensor.stride()):
        return f"{what} has strides {tensor.stride()}, with gaps or repeats; call .contiguous()"
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.numel() and tensor.data_ptr() % alignment:
        return (
            f"{what} begins {tensor.data_ptr() % alignment} bytes past a multiple of {alignment}, the alignment that "
            f"XLA needs; call .clone()"
        )
    return None


def is_compact(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether the axes, in some order, cover contiguous memory without gaps or repeated elements."""
    if math.prod(shape) == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@cache
def jax_device(device: torch.device) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the JAX device of a torch device.

    Raises:
        ValueError: JAX does not see the device.
    """
    platform = _PLATFORM.get(device.type)
    index = device.index or 0
    if device.type == "cuda" and device.index is None:
        index = torch.cuda.current_device()
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ValueError(f"JAX has no {platform} backend for {device}: {error}") from error
    if platform == "cpu":
        return devices[0]
    for candidate in devices:
        if candidate.local_hardware_id == index:
            return candidate
    raise ValueError(f"JAX does not see {device}; it has {devices}")


def torch_device(array: jax.Array) -> torch.device:
    """Returns the torch device of an array.

    Raises:
        NotZeroCopy: the array is on several devices.
    """
    devices = array.devices()
    if len(devices) != 1:
        raise NotZeroCopy(
            f"the array is on {len(devices)} devices; give one of `array.addressable_shards[i].data`"
        )
    device = next(iter(devices))
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id or 0)


def fence(device: torch.device) -> jax.Array:
    """Returns a small array that is ready when all work queued on torch's current stream is done.

    A JAX program with this operand runs after that work; the host does not wait.
    """
    if device not in _TOKENS:
        with torch.inference_mode(False):
            _TOKENS[device] = torch.zeros(64, device=device)
    return from_torch(_TOKENS[device])


_TOKENS: dict[torch.device, torch.Tensor] = {}


def _imported(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    """Imports a checked tensor; `stream` is JAX's stream and already waits for torch's."""
    if not tensor.numel():
        # An empty tensor has no memory to share.
        return jnp.zeros(
            tuple(tensor.shape), str(tensor.dtype)[6:], device=jax_device(tensor.device)
        )
    kind = _DLPACK_KIND[tensor.device.type]
    # This is the function below `jax.dlpack.from_dlpack`, which would order each tensor separately and repeat checks.
    capsule = to_dlpack(tensor)
    return _jax.dlpack_managed_tensor_to_buffer(
        capsule, jax_device(tensor.device), stream, False, kind
    )


def _after_torch(device: torch.device) -> int | None:
    """Returns a CUDA stream handle of JAX that waits for all work queued on torch's current stream."""
    if device.type == "cpu":
        return None
    stream: int = jax_device(device).get_stream_for_external_ready_events()
    torch.cuda.ExternalStream(stream, device=device).wait_stream(torch.cuda.current_stream(device))
    return stream


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a new contiguous tensor in a dtype that JAX supports."""
    if tensor.device.type not in _ALIGNMENT:
        raise ValueError(
            f"cannot copy from {tensor.device}: JAX shares memory on cpu and cuda only; move the tensor"
        )
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    narrow = _NARROWED.get(dense.dtype)
    if narrow is None or jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if not narrow.is_floating_point and not narrow.is_complex and dense.numel():
        limits = torch.iinfo(narrow)
        if int(dense.min()) < limits.min or int(dense.max()) > limits.max:
            raise ValueError(
                f"the {tensor.dtype} tensor has values from {int(dense.min())} to {int(dense.max())}, which do not "
                f"fit {narrow}; split or rescale them"
            )
    return dense.to(narrow).contiguous()


def _refuse_capture() -> None:
    """Raises `RuntimeError` while torch records a CUDA graph: JAX's own streams would not be part of the graph."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "JAX was called while torch records a CUDA graph; take leases and run our kernels outside of the capture"
        )
