"""Triton kernels for the small operations of decoder layers: norms, rotation, gated activations.

Each rounds where Transformers' own code does, so its results are those of the operations one by one, except for the
order of a norm's sum and the last bit of an exponential. A fused multiply-add would skip a rounding, so there are none.
Arguments are not checked.
"""

from typing import Any

import torch
import triton
import triton.language as tl

ROUNDED, CENTRED, WIDE = 0, 1, 2
"""Forms of a norm: rounded before the weight, as in Llama; times 1 + weight, as in Gemma; both wide, as in OLMo 2."""
SILU, GELU_TANH = 0, 1
_BLOCK = 1024


@triton.jit
def _add(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    return one + other


@triton.jit
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    read = tl.load(x + row + at, mask=inside, other=0.0)
    given = read.to(tl.float32)
    if ADDS:
        more = tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (given + more).to(read.dtype)
        tl.store(total + row + at, rounded, mask=inside)
        given = rounded.to(tl.float32)
    scaled = given * tl.rsqrt(tl.reduce(given * given, 0, _add) / WIDTH + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if FORM == 0:
        result = scaled.to(read.dtype).to(tl.float32) * factor
    elif FORM == 1:
        result = scaled * (1.0 + factor)
    else:
        result = factor * scaled
    tl.store(out + row + at, result.to(read.dtype), mask=inside)


@triton.jit(do_not_specialize=["q_row", "k_row", "angle_row"])
def _rotate(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    angle_row: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = q + row * q_row + head * (2 * HALF)
    target = q_out + (row * HEADS + head) * (2 * HALF)
    if head >= HEADS:
        source = k + row * k_row + (head - HEADS) * (2 * HALF)
        target = k_out + (row * KV_HEADS + head - HEADS) * (2 * HALF)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    read = tl.load(source + at, mask=inside, other=0.0)
    dtype = read.dtype
    low = read.to(tl.float32)
    high = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    angle = row * angle_row + at
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_low = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(
        tl.float32
    )
    turned_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(
        tl.float32
    )
    tl.store(target + at, turned_low.to(dtype), mask=inside)
    tl.store(target + HALF + at, turned_high.to(dtype), mask=inside)


@triton.jit
def _gate(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    read = tl.load(gate + at, mask=inside, other=0.0)
    x = read.to(tl.float32)
    if FORM == 0:
        active = tl.div_rn(x, 1.0 + tl.exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        # Near -1, tanh keeps its last bits only if it is taken of the absolute value.
        size = 1.0 - tl.div_rn(2.0, 1.0 + tl.exp(2.0 * tl.abs(inner)))
        active = 0.5 * x * (1.0 + tl.where(inner < 0.0, -size, size))
    rounded = active.to(read.dtype).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (rounded * other).to(read.dtype), mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: int) -> torch.Tensor:
    """Returns the RMS norm of a contiguous tensor over its last dimension.

    Args:
        x: [..., width].
        weight: [width], in x's dtype.
        eps: added to the mean square.
        form: `ROUNDED`, `CENTRED` or `WIDE`.
    """
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, out, eps, form, adds=False)
    return out


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x + residual`, and its norm as `norm` gives it; both tensors are contiguous."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, total, out, eps, form, adds=True)
    return total, out


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    form: int,
    *,
    adds: bool,
) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    launch: Any = _norm[(x.numel() // width,)]
    launch(
        x,
        residual,
        weight,
        total,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        FORM=form,
        ADDS=adds,
        enable_fp_fusion=False,
        num_warps=min(16, max(1, block // 256)),
    )


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries and keys of one token per row, rotated: element i with element i + head_dim / 2.

    Args:
        q: [rows, heads, 1, head_dim]; the heads of a row are adjacent.
        k: [rows, kv_heads, 1, head_dim], likewise.
        cos: [rows or 1, 1, head_dim], with adjacent elements.
        sin: likewise, with the same strides.
    """
    rows, heads, _, width = q.shape
    kv_heads, half = k.shape[1], width // 2
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    launch: Any = _rotate[(rows, heads + kv_heads)]
    launch(
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q.stride(0),
        k.stride(0),
        cos.stride(0) if len(cos) > 1 else 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        enable_fp_fusion=False,
        num_warps=1,
    )
    return q_out, k_out


def gate(given: torch.Tensor, up: torch.Tensor, form: int) -> torch.Tensor:
    """Returns the activation of `given` times `up`; both contiguous, of one shape and dtype.

    Args:
        given: the input of the activation.
        up: the other factor.
        form: `SILU` or `GELU_TANH`.
    """
    out, width = torch.empty_like(given), given.shape[-1]
    launch: Any = _gate[(given.numel() // width, triton.cdiv(width, _BLOCK))]
    launch(given, up, out, WIDTH=width, FORM=form, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out
