"""Our decode kernel on torch's own stream, without XLA: one launch on torch's pointers, and nothing to wait for.

It serves what needs no work of XLA's around the kernel; `calls.py` serves the rest. A CUDA graph of torch's may record
it. JAX compiles it per shape (`plgpu.as_torch_kernel`), and knows nothing of its runs.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import torch

import pallas_kernels
from pallas_kernels.paged_attention import mosaic_gpu
from torch_bridge.dlpack import jax_device

Launch = Callable[..., torch.Tensor]

IS_ON = False
"""Whether calls are launched so. Off until an H200 has run its test (test_on_gpu.py), which turns it on."""


def decode_kernel(
    *tensors: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Launch | None:
    """Returns the launch for tensors like these, or `None`: `q, k_pages, v_pages, page_table, seq_lens`.

    It is `None` unless `IS_ON`, off Hopper, where XLA would have to fill heads or to join parts, and on other streams
    or devices than those that `as_torch_kernel` launches on: the default stream of the current device.

    Raises:
        ValueError: shapes, dtypes or options do not fit, as `pallas_kernels.paged_attention` says.
    """
    device = tensors[0].device
    if not IS_ON or device.type != "cuda" or device.index != torch.cuda.current_device():
        return None
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return None
    # Whoever shares them with JAX says what is wrong with the others.
    if any(t.device != device or not t.is_contiguous() or t.data_ptr() % 16 for t in tensors):
        return None
    like = tuple((tuple(tensor.shape), str(tensor.dtype)[6:]) for tensor in tensors)
    return _compiled(device, like, scale, window, soft_cap)


@lru_cache(maxsize=256)
def _compiled(
    device: torch.device,
    like: tuple[tuple[tuple[int, ...], str], ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Launch | None:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in like]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.paged_attention, **options), *structs)
        q, k_pages, _, page_table, _ = structs
        kernel = mosaic_gpu.alone(q, k_pages, page_table.shape[1], **options)
    return None if kernel is None else plgpu.as_torch_kernel(kernel)
