"""Arrays and tensors that share memory: both directions, refused where they would copy. Knows no cache.

JAX hands out what torch may write to, and never learns of such writes; who may write when is `leases.py`'s business.
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

# XLA reads its buffers with aligned vector instructions. On a GPU a smaller offset imports, and fails when used.
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
    """Returns a tensor in the array's own memory, ordered after what computes it on torch's current stream.

    The host does not wait. The tensor can be written to, which JAX neither forbids nor notices, and while it or a
    view of it lives the array cannot be donated.

    Raises:
        NotZeroCopy: the array lies on several devices, or torch has no such dtype.
    """
    return to_torch_all([array])[0]


def to_torch_all(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """Returns tensors in the memory of arrays of one device, asking for torch's stream once. Else like `to_torch`."""
    if not arrays:
        return []
    stream = _stream_of_torch(arrays[0])
    # Inside inference_mode a tensor would keep no count of writes, which leases that only read rely on.
    with torch.inference_mode(False):
        return [_exported(array, stream) for array in arrays]


def _stream_of_torch(array: jax.Array) -> int | None:
    """Returns torch's current stream on the array's device, in DLPack's numbers: 1 is the legacy default stream."""
    device = torch_device(array)
    if device.type == "cpu":
        return None
    _refuse_capture()
    return torch.cuda.current_stream(device).cuda_stream or 1


def _exported(array: jax.Array, stream: int | None) -> torch.Tensor:
    try:
        # What `array.__dlpack__` calls, after it has asked again what was asked here.
        tensor = from_dlpack(
            _jax.buffer_to_dlpack_managed_tensor(array.addressable_data(0), stream=stream)
        )
    except (BufferError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise NotZeroCopy(
            f"torch has no view of {array.dtype}{list(array.shape)}: {error}. Store it as uint8"
        ) from error
    if array.size and tensor.data_ptr() != array.unsafe_buffer_pointer():
        raise NotZeroCopy(f"torch copied {array.dtype}{list(array.shape)}, so nothing is shared")
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an 8-bit float tensor as the uint8 it is stored as, and any other as it is; no byte moves."""
    return tensor.view(torch.uint8) if str(tensor.dtype)[6:] in _BYTE_FLOATS else tensor


def from_torch(tensor: torch.Tensor, *, copy: bool = False) -> jax.Array:
    """Returns an array in the tensor's own memory, ordered after what torch's current stream holds so far.

    The host does not wait. Writing to the tensor afterwards changes an array that JAX takes for constant; import it
    again after each write, and give it to one owner only: on a GPU a step that is given the array as a donation
    writes into the tensor.

    Args:
        tensor: on the CPU or an NVIDIA GPU that JAX sees too.
        copy: allow one where it is needed: 64-bit numbers are then narrowed to 32 bits (integers must fit), other
            strides are made compact, and a tensor that requires gradients is detached.

    Raises:
        NotZeroCopy: it cannot be shared, and `copy` is False; the message says why.
        ValueError: 64-bit integers that do not fit 32 bits, or a device that JAX does not see.
    """
    return from_torch_all([tensor], copy=copy)[0]


def from_torch_all(tensors: Sequence[torch.Tensor], *, copy: bool = False) -> list[jax.Array]:
    """Returns arrays in the memory of tensors of one device, ordered all at once. Else like `from_torch`."""
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
            f"tensors lie on {sorted({str(t.device) for t in ready})}; move them to one device"
        )
    if device.type == "cpu":
        arrays = [_imported(tensor, None) for tensor in ready]
    else:
        _refuse_capture()
        # torch exports nothing from a device that is not the current one.
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
        return f"{what} is on {tensor.device}, and JAX shares memory on cpu and cuda alone; move it"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"{what} is not a plain dense one ({tensor.layout}); make it dense"
    if tensor.requires_grad:
        return f"{what} requires gradients, which JAX would not record; call .detach()"
    if tensor.is_conj() or tensor.is_neg():
        return f"{what} is conjugated or negated lazily; call .resolve_conj().resolve_neg()"
    if tensor.dtype in _NARROWED and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return f"JAX would narrow {what} into a copy; cast it to {_NARROWED[tensor.dtype]} in torch"
    if not is_compact(tensor.shape, tensor.stride()):
        return f"{what} has the strides {tensor.stride()}, with gaps or repeats; call .contiguous()"
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.numel() and tensor.data_ptr() % alignment:
        return (
            f"{what} begins {tensor.data_ptr() % alignment} bytes past a multiple of {alignment}, where XLA "
            f"cannot use it; call .clone()"
        )
    return None


def is_compact(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the axes, in some order, fill a stretch of memory without gaps and each number once."""
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
    """Returns JAX's name of a torch device.

    Raises:
        ValueError: JAX does not see it.
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
    """Returns torch's name of the device that an array lies on.

    Raises:
        NotZeroCopy: it lies on several.
    """
    devices = array.devices()
    if len(devices) != 1:
        raise NotZeroCopy(
            f"the array lies on {len(devices)} devices; give one of `array.addressable_shards[i].data`"
        )
    device = next(iter(devices))
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", device.local_hardware_id or 0)


def fence(device: torch.device) -> jax.Array:
    """Returns a small array that exists once everything that torch's current stream holds so far is done.

    A JAX program that takes it as an operand runs after that, and the host waits for nothing.
    """
    if device not in _TOKENS:
        with torch.inference_mode(False):
            _TOKENS[device] = torch.zeros(64, device=device)
    return from_torch(_TOKENS[device])


_TOKENS: dict[torch.device, torch.Tensor] = {}


def _imported(tensor: torch.Tensor, stream: int | None) -> jax.Array:
    """Wraps a tensor that nothing speaks against; `stream` is JAX's and waits for torch's already."""
    if not tensor.numel():
        # An empty tensor has no memory to share.
        return jnp.zeros(
            tuple(tensor.shape), str(tensor.dtype)[6:], device=jax_device(tensor.device)
        )
    kind = _DLPACK_KIND[tensor.device.type]
    # What `jax.dlpack.from_dlpack` calls; that would order each tensor by itself, and ask again what was asked here.
    capsule = to_dlpack(tensor)
    return _jax.dlpack_managed_tensor_to_buffer(
        capsule, jax_device(tensor.device), stream, False, kind
    )


def _after_torch(device: torch.device) -> int | None:
    """Returns a stream of JAX's, in CUDA's numbers, that waits for what torch's current one holds so far."""
    if device.type == "cpu":
        return None
    stream: int = jax_device(device).get_stream_for_external_ready_events()
    torch.cuda.ExternalStream(stream, device=device).wait_stream(torch.cuda.current_stream(device))
    return stream


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a new compact tensor, in a dtype that JAX keeps."""
    if tensor.device.type not in _ALIGNMENT:
        raise ValueError(
            f"cannot copy from {tensor.device}: JAX shares memory on cpu and cuda alone"
        )
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    narrow = _NARROWED.get(dense.dtype)
    if narrow is None or jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if not narrow.is_floating_point and not narrow.is_complex and dense.numel():
        limits = torch.iinfo(narrow)
        if int(dense.min()) < limits.min or int(dense.max()) > limits.max:
            raise ValueError(
                f"the {tensor.dtype} tensor holds numbers from {int(dense.min())} to {int(dense.max())}, which do not "
                f"fit {narrow}"
            )
    return dense.to(narrow).contiguous()


def _refuse_capture() -> None:
    """JAX allocates and launches on streams of its own, which a graph that torch records would lose."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "JAX was called while torch records a CUDA graph; take leases and run our kernels outside of the capture"
        )
