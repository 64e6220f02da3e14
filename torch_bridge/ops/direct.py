"""Kernels that torch launches directly, without XLA: those that need no XLA operations around them.

`calls.py` runs all others. A CUDA graph of torch may record a direct launch after a first launch outside of the
capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from torch_bridge.ops.unpacked_pages import Stored, unpacked
from torch_bridge.sharing.dlpack import jax_device

IS_ON = True
"""Whether direct launches are enabled; otherwise all calls go through XLA, as on all devices except Hopper."""

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Plan = Callable[..., tuple[jax.Array, jax.Array]]
"""Computes the query tiles and their count from `seq_lens` and `cu_q_lens`, for the kernel of packed queries."""

_NUM_DECODE, _NUM_PACKED = 5, 6
"""Arguments of decode attention, and of packed queries, without sinks and scales."""


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

    def __call__(
        self,
        q: torch.Tensor,
        *others: torch.Tensor,
        sinks: torch.Tensor | None = None,
        scales: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Returns the output, [rows, heads, head_dim]. Arguments are not checked.

        Args:
            q: [rows, heads, head_dim].
            *others: `k_pages, v_pages, page_table, seq_lens`.
            sinks: [heads], if the launch is one with sinks.
            scales: `k_scales, v_scales` for 8-bit pages.
        """
        if self._missing:
            q = torch.nn.functional.pad(q, (0, 0, 0, self._missing))
        if sinks is not None:
            wide = torch.nn.functional.pad(sinks.float(), (0, self._missing))
            others = (*others, fitted(wide))
        out, *more = self._launch(q, *others, *scales)
        return out if self._columns is None else self._join(out, *more).to(q.dtype)

    def _join(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Combines the parts of each row (in the form of `DirectLaunch.launch`); rows without keys give zeros."""
        assert self._columns is not None
        by_head = out.transpose(3, 4).flatten(2, 3).index_select(2, self._columns)
        weight = (lse.flatten(2).index_select(2, self._columns) * log(2)).softmax(1).nan_to_num(0.0)
        return (by_head * weight[..., None]).sum(1)


@dataclass(frozen=True)
class Packed:
    """Attention of packed queries: the kernel's launch, with sinks and 8-bit pages laid out for it in torch.

    Attributes:
        plan: a JAX program of `seq_lens` and `cu_q_lens` that computes tiles and count, once per step for all layers.
    """

    _launch: Launch
    plan: Plan
    _keys: int
    _pack: int
    _repeats: int
    _window: int | None

    def __call__(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        *tiles: torch.Tensor,
        sinks: torch.Tensor | None = None,
        stored: Stored | None = None,
    ) -> torch.Tensor:
        """Returns the output, [tokens, heads, head_dim]. Arguments are not checked.

        Args:
            q: [tokens, heads, head_dim].
            k_pages: the key pool.
            v_pages: the value pool.
            page_table: int32 [rows, table_width].
            *tiles: the plan's results as tensors.
            sinks: [heads], if the launch is one with sinks.
            stored: scales and lengths, if the launch is one for 8-bit pages.
        """
        pools, more = (k_pages, v_pages, page_table), ()
        if stored is not None:
            *pools, k_scales, v_scales = unpacked(
                *pools, stored, keys=self._keys, window=self._window
            )
            more = (k_scales, v_scales)
        tensors = (q, *pools, *tiles, *more)
        if sinks is not None:
            rows = sinks.float().view(-1, self._pack).repeat_interleave(self._repeats, 1)
            tensors = (*tensors, fitted(rows))
        return self._launch(*tensors)[0]


def decode_kernel(
    *tensors: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, ...] = (),
) -> Decode | None:
    """Returns the launch for tensors of these shapes and dtypes.

    It returns `None` if XLA would have to pad groups of heads, if `launches_on` is false, or if `load` refuses.

    Args:
        *tensors: `q, k_pages, v_pages, page_table, seq_lens`.
        scale: as in `pallas_kernels.paged_attention`.
        window: as in `pallas_kernels.paged_attention`.
        soft_cap: as in `pallas_kernels.paged_attention`.
        sinks: a layer's sinks, which the launch is given too; `None` without sinks.
        scales: `k_scales, v_scales` for 8-bit pages, likewise.

    Raises:
        ValueError: shapes, dtypes or options do not fit, as in `pallas_kernels.paged_attention`.
        RuntimeError: the kernel is not loaded yet, and torch is recording a CUDA graph.
    """
    # Tensors with an unsupported memory layout go through `calls.py`, where sharing them with JAX raises the error.
    if not launches_on(*tensors, *scales) or not _is_near(sinks, tensors[0]):
        return None
    like = _alike((*tensors, *scales))
    return _decode(tensors[0].device, like, _like(sinks), scale, window, soft_cap)


def ragged_kernel(
    *tensors: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, ...] = (),
) -> Packed | None:
    """Returns the launch for tensors of these shapes and dtypes, or `None` as in `decode_kernel`.

    It also returns `None` for a number of tokens that is not a multiple of 8, and where bfloat16 copies of 8-bit pages
    would be too large.

    Args:
        *tensors: `q, k_pages, v_pages, page_table, seq_lens, cu_q_lens`.
        scale: as in `pallas_kernels.ragged_attention`.
        window: as in `pallas_kernels.ragged_attention`.
        soft_cap: as in `pallas_kernels.ragged_attention`.
        sinks: a layer's sinks, which the launch is given too; `None` without sinks.
        scales: `k_scales, v_scales` for 8-bit pages, likewise.
    """
    if not launches_on(*tensors, *scales) or not _is_near(sinks, tensors[0]):
        return None
    like = _alike((*tensors, *scales))
    return _ragged(tensors[0].device, like, _like(sinks), scale, window, soft_cap)


def _is_near(sinks: torch.Tensor | None, q: torch.Tensor) -> bool:
    """Whether sinks are on the queries' device; they are copied, so they may lie anyhow."""
    return sinks is None or sinks.device == q.device


def _like(tensor: torch.Tensor | None) -> Like | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


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
    sinks: Like | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Decode | None:
    structs, more = _structs(like), {}
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if sinks is not None:
        more["sinks"] = _structs((sinks,))[0]
    if len(structs) > _NUM_DECODE:
        more["k_scales"], more["v_scales"] = structs[_NUM_DECODE:]
    with jax.default_device(jax_device(device)):
        attend = partial(pallas_kernels.paged_attention, **options)
        jax.eval_shape(attend, *structs[:_NUM_DECODE], **more)
        q, k_pages, _, page_table, _ = structs[:_NUM_DECODE]
        kernel = paged_attention.direct_launch(
            q, k_pages, page_table.shape[1], **options, has_sinks=sinks is not None
        )
        if kernel is None:
            return None
        rows, heads, head_dim = q.shape
        given = [jax.ShapeDtypeStruct((rows, kernel.padded_heads, head_dim), q.dtype)]
        given += structs[1:_NUM_DECODE]
        if sinks is not None:
            given.append(jax.ShapeDtypeStruct((kernel.padded_heads,), "float32"))
        launch = load(kernel.launch, [*given, *structs[_NUM_DECODE:]], device)
    missing = kernel.padded_heads - heads
    return None if launch is None else Decode(launch, missing, kernel.columns, device)


@lru_cache(maxsize=256)
def _ragged(
    device: torch.device,
    like: tuple[Like, ...],
    sinks: Like | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Packed | None:
    structs = _structs(like)
    structs, scales = structs[:_NUM_PACKED], structs[_NUM_PACKED:]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    more = {} if sinks is None else {"sinks": _structs((sinks,))[0]}
    more |= dict(zip(("k_scales", "v_scales"), scales, strict=False))
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.ragged_attention, **options), *structs, **more)
        q, k_pages, _, page_table, *lengths = structs
        if window is not None and window >= page_table.shape[1] * k_pages.shape[1]:
            options["window"] = None
        kernel = ragged_attention.direct_launch(
            q, k_pages, page_table, **options, has_sinks=sinks is not None
        )
        if kernel is None:
            return None
        given = [*structs[:4], *jax.eval_shape(kernel.plan, *lengths)]
        if scales:
            rows, width = page_table.shape
            page_size, kv_heads, head_dim = k_pages.shape[1:]
            copies = jax.ShapeDtypeStruct((rows * width, page_size, kv_heads, head_dim), q.dtype)
            num_tiles = -(-width * page_size // kernel.keys)
            by_tile = jax.ShapeDtypeStruct((rows, kv_heads, num_tiles, kernel.keys), "float32")
            given = [q, copies, copies, *given[3:], by_tile, by_tile]
        if sinks is not None:
            heads = q.shape[1]
            shape = (heads // kernel.pack, kernel.pack * kernel.repeats)
            given.append(jax.ShapeDtypeStruct(shape, "float32"))
        launch = load(kernel.launch, given, device)
    if launch is None:
        return None
    plan, shown = jax.jit(kernel.plan), options["window"]
    return Packed(launch, plan, kernel.keys, kernel.pack, kernel.repeats, shown)


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
