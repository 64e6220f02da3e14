"""The ops of `pallas_kernels` on torch tensors, as `torch.library` custom ops for use under `torch.compile`.

`torch.compile` keeps the ops in one graph. Each op is one jitted call through DLPack. JAX chooses the Mosaic kernels on
Hopper, and XLA on other devices and the CPU. Attention whose kernel needs no XLA operations around it is launched
without XLA (`ops/direct.py`); torch pads packed queries and converts their 8-bit pages. Pools are updated in place: on
a GPU by the kernel itself, on the CPU by a copy of XLA's result, since XLA does not write into foreign memory there. A
CUDA graph must not record these ops (`torch.Tag.cudagraph_unsafe`): JAX launches on its own stream.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from torch_bridge.ops.calls import hand_out, run
from torch_bridge.ops.direct import decode_kernel, ragged_kernel
from torch_bridge.ops.unpacked_pages import Stored
from torch_bridge.sharing.dlpack import from_torch_all, to_torch

_TAGS = (torch.Tag.cudagraph_unsafe,)
_TILE = 8
"""Packed queries that the kernel copies at a time."""


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes decode attention of one query per row over its pages: `pallas_kernels.paged_attention` on tensors.

    Args:
        q: [rows, heads, head_dim], after rotary embedding.
        k_pages: [pages, page_size, kv_heads, head_dim].
        v_pages: [pages, page_size, kv_heads, head_dim].
        page_table: int32 [rows, table_width].
        seq_lens: int32 [rows], number of keys of each row, the query's own included.
        scale: factor of the scores.
        window: number of most recent keys that a query sees, its own included; `None` for all.
        soft_cap: replaces scores by soft_cap * tanh(scores / soft_cap); `None` for no cap.
        sinks: [heads], logits that join the softmax's denominator.
        k_scales: float32 [pages, page_size, kv_heads], for 8-bit pages.
        v_scales: float32 [pages, page_size, kv_heads], for 8-bit pages.
        return_lse: whether to also return the log-sum-exp, float32 [rows, heads].

    Returns:
        The output, [rows, heads, head_dim] in q's dtype; with `return_lse`, also the log-sum-exp.

    Raises:
        NotZeroCopy: a tensor cannot be shared with JAX; the message gives the remedy: cast, detach or clone it.
        ValueError: shapes, dtypes or options do not fit.
    """
    arrays = (q, k_pages, v_pages, page_table, seq_lens)
    options = (scale, window, soft_cap, sinks, k_scales, v_scales)
    return _PAGED[return_lse](*arrays, *options)


def ragged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal attention of packed queries: `pallas_kernels.ragged_attention` on tensors.

    Arguments and errors are those of `paged_attention`, except for two: q is [tokens, heads, head_dim], one row after
    the other, and `cu_q_lens`, int32 [rows + 1], has the bounds of each row's queries.
    """
    arrays = (q, k_pages, v_pages, page_table, seq_lens, cu_q_lens)
    options = (scale, window, soft_cap, sinks, k_scales, v_scales)
    return _RAGGED[return_lse](*arrays, *options)


def page_write(pages: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    """Writes one value per token into pools, in place: `pallas_kernels.page_write` on tensors.

    Args:
        pages: pools that share page ids, [pages, page_size, ...].
        values: for each pool, [tokens, ...].
        slots: int32 [tokens], `page * page_size + offset`; slots >= `pages * page_size` write nothing.
    """
    _page_write(list(pages), list(values), slots)


def rotary_write(
    pages: Sequence[Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    *,
    norm: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Rotates queries and keys and writes keys and values, in place: `pallas_kernels.rotary_write` on tensors.

    Norms of values are left to the caller.

    Args:
        pages: pools of keys and of values, followed by those of their scales if they have 8 bits.
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        cos: float32 [tokens, half].
        sin: float32 [tokens, half].
        slots: int32 [tokens], as in `page_write`.
        norm: [2, head_dim], weights of the norms of queries and keys; `None` for no norm.
        norm_eps: epsilon that a norm adds to the mean square.

    Returns:
        The queries, [tokens, heads, head_dim].
    """
    return _rotary_write(list(pages), qkv, cos, sin, slots, norm, norm_eps)


def _shared(*tensors: Tensor | None) -> list:
    given = [tensor.detach() for tensor in tensors if tensor is not None]
    arrays = iter(from_torch_all(given))
    return [None if tensor is None else next(arrays) for tensor in tensors]


_POOLS = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seq_lens"
_OPTIONS = (
    "float scale, int? window, float? soft_cap, Tensor? sinks, Tensor? k_scales, Tensor? v_scales"
)
_NAMES = [option.split()[1] for option in _OPTIONS.split(", ")]


def _direct(
    op: str, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> Callable[..., Tensor] | None:
    """Returns the launch without XLA; `None` if there is none."""
    sinks, *scales = (options[name] for name in ("sinks", "k_scales", "v_scales"))
    # The op's own check refuses one without the other.
    if (scales[0] is None) != (scales[1] is None):
        return None
    more = {"sinks": sinks, "scales": tuple(one for one in scales if one is not None)}
    numbers = {name: options[name] for name in ("scale", "window", "soft_cap")}
    given = tuple(tensor.detach() for tensor in tensors)
    if op == "paged_attention":
        launch = decode_kernel(*given, **numbers, **more)
        return launch and partial(launch, **more)
    q, *pools, seq_lens, cu_q_lens = given
    if q.ndim != 3 or not q.numel() or not pools[-1].numel():
        return None  # The op itself checks, and serves what is empty.
    tokens, lengths = len(q), (seq_lens, cu_q_lens)
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -tokens % _TILE))
    packed = ragged_kernel(q, *pools, *lengths, **numbers, **more)
    if packed is None:
        return None
    k_scales, v_scales = scales
    stored = None if k_scales is None else Stored(k_scales, v_scales, *lengths)
    tiles = [hand_out(array) for array in packed.plan(*from_torch_all(lengths))]
    return lambda *_: packed(q, *pools, *tiles, sinks=sinks, stored=stored)[:tokens]


def _attention(op: str, arrays: str, *, return_lse: bool) -> CustomOpDef:
    """Registers an attention op; with `return_lse` it is a separate op, since it returns two tensors."""
    count = arrays.count(",") + 1

    def run_op(*args: Any) -> Any:  # noqa: ANN401 - the types are in the schema
        options = dict(zip(_NAMES, args[count:], strict=True))
        launch = None if return_lse else _direct(op, args[:count], options)
        if launch is not None:
            return launch(*args[:count])
        optional = [name for name, value in options.items() if isinstance(value, Tensor)]
        arrays = _shared(*args[:count], *(options[name] for name in optional))
        options |= dict(zip(optional, arrays[count:], strict=True))
        out = run(op, *arrays[:count], return_lse=return_lse, **options)
        return tuple(map(hand_out, out)) if return_lse else hand_out(out)

    def run_fake(*args: Any) -> Any:  # noqa: ANN401
        out = torch.empty_like(args[0])
        return (out, out.new_empty(out.shape[:2], dtype=torch.float32)) if return_lse else out

    name = f"jaxkv::{op}_lse" if return_lse else f"jaxkv::{op}"
    schema = f"({arrays}, {_OPTIONS}) -> {'(Tensor, Tensor)' if return_lse else 'Tensor'}"
    made = custom_op(name, run_op, mutates_args=(), schema=schema, tags=_TAGS)
    made.register_fake(run_fake)
    return made


_PAGED = {lse: _attention("paged_attention", _POOLS, return_lse=lse) for lse in (False, True)}
_RAGGED = {
    lse: _attention("ragged_attention", f"{_POOLS}, Tensor cu_q_lens", return_lse=lse)
    for lse in (False, True)
}


@custom_op("jaxkv::page_write", mutates_args=("pages",), tags=_TAGS)
def _page_write(pages: list[Tensor], values: list[Tensor], slots: Tensor) -> None:
    *arrays, where = _shared(*pages, *values, slots)
    pools, new = tuple(arrays[: len(pages)]), tuple(arrays[len(pages) :])
    del arrays
    result = run("page_write", pools, new, where, donate=1)
    _copy_back(pages, result)


@custom_op("jaxkv::rotary_write", mutates_args=("pages",), tags=_TAGS)
def _rotary_write(
    pages: list[Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    norm: Tensor | None,
    norm_eps: float,
) -> Tensor:
    *pools, qkv_, cos_, sin_, slots_, norm_ = _shared(*pages, qkv, cos, sin, slots, norm)
    arrays = (qkv_, cos_, sin_, slots_)
    q, result = run("rotary_write", tuple(pools), *arrays, donate=1, norm=norm_, norm_eps=norm_eps)
    _copy_back(pages, result)
    return hand_out(q)


def _copy_back(pages: list[Tensor], written: tuple) -> None:
    """Orders torch after the writes, and copies them if XLA did not write into torch's memory."""
    for pool, array in zip(pages, written, strict=True):
        result = to_torch(array)
        if pool.numel() and result.data_ptr() != pool.data_ptr():
            pool.copy_(result)


@_page_write.register_fake
def _(pages: list[Tensor], values: list[Tensor], slots: Tensor) -> None:
    return None


@_rotary_write.register_fake
def _(pages: list[Tensor], qkv: Tensor, *rest: object) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * pages[0].shape[2], qkv.shape[2])
