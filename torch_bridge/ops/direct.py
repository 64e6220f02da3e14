"""Kernels that torch launches directly, without XLA: those that need no XLA operations around them.

`calls.py` runs all others. A CUDA graph of torch may record a direct launch after a first launch outside of the
capture.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import log, prod

import jax
import numpy as np
import torch

import pallas_kernels
from pallas_kernels.page_write import api as page_write
from pallas_kernels.paged_attention import api as paged_attention
from pallas_kernels.ragged_attention import api as ragged_attention
from torch_bridge.ops.launch import Launch, load
from torch_bridge.sharing.dlpack import jax_device

IS_ON = True
"""Whether direct launches are enabled; otherwise all calls go through XLA, as on all devices except Hopper."""

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Plan = Callable[..., tuple[jax.Array, jax.Array]]
"""Computes the query tiles and their count from `seq_lens` and `cu_q_lens`, for the kernel of packed queries."""


class Decode:
    """Decode attention: the kernel's launch, with padding before it and the split-K reduction after it in torch.

    Args:
        launch: the kernel's launch.
        missing: number of zero heads to append to the queries.
        columns: if the kernel splits rows, the index of each head in its output (`DirectLaunch.columns`); else `None`.
        device: torch's current device.
    """

    def __init__(
        self, launch: Launch, missing: int, columns: np.ndarray | None, device: torch.device
    ) -> None:
        self._launch, self._missing = launch, missing
        self._columns = None if columns is None else torch.from_numpy(columns).to(device)

    def __call__(self, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Returns the output, [rows, heads, head_dim]. Arguments are not checked.

        Args:
            q: [rows, heads, head_dim].
            *others: `k_pages, v_pages, page_table, seq_lens`.
        """
        if self._missing:
            q = torch.nn.functional.pad(q, (0, 0, 0, self._missing))
        out, *more = self._launch(q, *others)
        return out if self._columns is None else self._join(out, *more).to(q.dtype)

    def _join(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Combines the parts of each row (in the form of `DirectLaunch.launch`); rows without keys give zeros."""
        assert self._columns is not None
        by_head = out.transpose(3, 4).flatten(2, 3).index_select(2, self._columns)
        weight = (lse.flatten(2).index_select(2, self._columns) * log(2)).softmax(1).nan_to_num(0.0)
        return (by_head * weight[..., None]).sum(1)


def decode_kernel(
    *tensors: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Decode | None:
    """Returns the launch for `q, k_pages, v_pages, page_table, seq_lens` of these shapes and dtypes.

    It returns `None` if XLA would have to pad groups of heads, if `launches_on` is false, or if `load` refuses.

    Raises:
        ValueError: shapes, dtypes or options do not fit, as in `pallas_kernels.paged_attention`.
        RuntimeError: the kernel is not loaded yet, and torch is recording a CUDA graph.
    """
    # Tensors with an unsupported memory layout go through `calls.py`, where sharing them with JAX raises the error.
    if not launches_on(*tensors):
        return None
    return _decode(tensors[0].device, _alike(tensors), scale, window, soft_cap)


def ragged_kernel(
    *tensors: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Launch, Plan] | None:
    """Returns the launch and its plan for tensors of these shapes and dtypes, or `None` as in `decode_kernel`.

    Args:
        *tensors: `q, k_pages, v_pages, page_table, seq_lens, cu_q_lens`.
        scale: as in `pallas_kernels.ragged_attention`.
        window: as in `pallas_kernels.ragged_attention`.
        soft_cap: as in `pallas_kernels.ragged_attention`.

    Returns:
        The launch, of `q, k_pages, v_pages, page_table` and the plan's two results as tensors; and the plan, a JAX
        program of `seq_lens` and `cu_q_lens`.
    """
    if not launches_on(*tensors):
        return None
    return _ragged(tensors[0].device, _alike(tensors), scale, window, soft_cap)


def write_kernel(*tensors: torch.Tensor) -> Launch | None:
    """Returns the launch for slots, values of each pool, and pools of these shapes, or `None` as in `decode_kernel`.

    Values are [tokens, ...] in their pool's dtype, pools [pages, page_size, ...]. The kernel writes into the pools.
    """
    if not launches_on(*tensors):
        return None
    return _write(tensors[0].device, _alike(tensors))


def launches_on(*tensors: torch.Tensor) -> bool:
    """Returns whether kernels can be launched on tensors.

    `IS_ON` must be set, all tensors must be on torch's current GPU, contiguous and aligned (`fits`).
    """
    device = tensors[0].device
    if not IS_ON or device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return all(tensor.device == device and fits(tensor) for tensor in tensors)


def fits(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous and aligned, as kernels require."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def fitted(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a contiguous and aligned copy."""
    return tensor if fits(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def _decode(
    device: torch.device,
    like: tuple[Like, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Decode | None:
    structs = _structs(like)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.paged_attention, **options), *structs)
        q, k_pages, _, page_table, _ = structs
        kernel = paged_attention.direct_launch(q, k_pages, page_table.shape[1], **options)
        if kernel is None:
            return None
        rows, heads, head_dim = q.shape
        given = jax.ShapeDtypeStruct((rows, kernel.padded_heads, head_dim), q.dtype)
        launch = load(kernel.launch, [given, *structs[1:]], device)
    missing = kernel.padded_heads - heads
    return None if launch is None else Decode(launch, missing, kernel.columns, device)


@lru_cache(maxsize=256)
def _ragged(
    device: torch.device,
    like: tuple[Like, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Launch, Plan] | None:
    structs = _structs(like)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.ragged_attention, **options), *structs)
        q, k_pages, _, page_table, *lengths = structs
        if window is not None and window >= page_table.shape[1] * k_pages.shape[1]:
            options["window"] = None
        found = ragged_attention.direct_launch(q, k_pages, page_table.shape[0], **options)
        if found is None:
            return None
        kernel, plan = found
        tiles = jax.eval_shape(plan, *lengths)
        launch = load(kernel, [*structs[:4], *tiles], device)
    return None if launch is None else (launch, jax.jit(plan))


@lru_cache(maxsize=256)
def _write(device: torch.device, like: tuple[Like, ...]) -> Launch | None:
    slots, *others = _structs(like)
    count = len(others) // 2
    values, pools = others[:count], others[count:]
    flat = [
        jax.ShapeDtypeStruct((*one.shape[:kept], prod(one.shape[kept:])), one.dtype)
        for kept, ones in ((1, values), (2, pools))
        for one in ones
    ]
    with jax.default_device(jax_device(device)):
        launch = page_write.direct_launch(tuple(pools), tuple(values), slots)
        return None if launch is None else load(launch, [slots, *flat], device)


def _alike(tensors: tuple[torch.Tensor, ...]) -> tuple[Like, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _structs(like: tuple[Like, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, str(dtype)[6:]) for shape, dtype in like]
