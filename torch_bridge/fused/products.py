"""Triton kernels for products of few rows with one to three weights, which they read once at the memory's speed."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

MAX_ROWS = 32
_ROW_BLOCK, _ROW_DEPTH = 2, 2048
_BLOCK, _DEPTH, _STAGES = 64, 128, 4
"""Outputs and inputs of one program, for one row and for several; the best of those tried on an H200."""


@triton.jit
def _add(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    return one + other


@triton.jit(do_not_specialize=["n0", "n1"])
def _row_product(
    x: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    o0: tl.tensor,
    o1: tl.tensor,
    o2: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    first = tl.program_id(0) * BLOCK
    w, o = w0, o0
    if first >= n0 + n1:
        w, o, first = w2, o2, first - n0 - n1
    elif first >= n0:
        w, o, first = w1, o1, first - n0
    rows = first + tl.arange(0, BLOCK)
    total = tl.full((BLOCK, DEPTH), 0.0, tl.float32)
    for start in range(0, WIDTH, DEPTH):
        at = start + tl.arange(0, DEPTH)
        given = tl.load(x + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        place = rows[:, None].to(tl.int64) * WIDTH + at[None, :]
        weight = tl.load(
            w + place, mask=at[None, :] < WIDTH, other=0.0, eviction_policy="evict_first"
        )
        total += weight.to(tl.float32) * given[None, :]
    result = tl.reduce(total, 1, _add).to(x.dtype.element_ty)  # pyright: ignore
    tl.store(o + rows, result)


@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2"])
def _rows_product(
    x: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    o0: tl.tensor,
    o1: tl.tensor,
    o2: tl.tensor,
    rows: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    first = tl.program_id(0) * BLOCK
    w, o, n = w0, o0, n0
    if first >= n0 + n1:
        w, o, n, first = w2, o2, n2, first - n0 - n1
    elif first >= n0:
        w, o, n, first = w1, o1, n1, first - n0
    outputs = first + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    total = tl.full((BLOCK, ROWS), 0.0, tl.float32)
    # Pyright takes Triton's type for Python's.
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):  # pyright: ignore
        at = start + tl.arange(0, DEPTH)
        weight = tl.load(w + outputs[:, None].to(tl.int64) * WIDTH + at[None, :])
        given = tl.load(x + row[None, :] * WIDTH + at[:, None], mask=row[None, :] < rows, other=0.0)
        total = tl.dot(weight, given, total)
    place = row[None, :] * n + outputs[:, None]
    result = total.to(x.dtype.element_ty)  # pyright: ignore
    tl.store(o + place, result, mask=row[None, :] < rows)


def is_faster(rows: int, width: int, sizes: Sequence[int]) -> bool:
    """Whether a kernel here beats cuBLAS, which computes one product after the other.

    Args:
        rows: number of rows.
        width: inputs of each row.
        sizes: outputs of each weight.
    """
    if rows == 1:
        return all(size % _ROW_BLOCK == 0 for size in sizes)
    fits = width % _DEPTH == 0 and all(size % _BLOCK == 0 for size in sizes)
    return 1 < rows <= MAX_ROWS and len(sizes) > 1 and fits


def products(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns `x @ weight.T` for each weight, summed in float32 and rounded once.

    Args:
        x: [..., width], contiguous, of sizes for which `is_faster`.
        weights: one to three, [size, width], contiguous, in x's dtype.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    sizes = [len(weight) for weight in weights]
    outs = [x.new_empty(*x.shape[:-1], size) for size in sizes]
    missing = 3 - len(weights)
    pointers = [*weights, *[weights[0]] * missing, *outs, *[outs[0]] * missing]
    n0, n1, n2 = [*sizes, *[0] * missing]
    if rows == 1:
        row_launch: Any = _row_product[(sum(sizes) // _ROW_BLOCK,)]
        depth = min(_ROW_DEPTH, triton.next_power_of_2(width))
        row_launch(x, *pointers, n0, n1, WIDTH=width, BLOCK=_ROW_BLOCK, DEPTH=depth, num_warps=4)
        return outs
    launch: Any = _rows_product[(sum(sizes) // _BLOCK,)]
    launch(
        x,
        *pointers,
        rows,
        n0,
        n1,
        n2,
        WIDTH=width,
        ROWS=16 if rows <= 16 else MAX_ROWS,
        BLOCK=_BLOCK,
        DEPTH=_DEPTH,
        STAGES=_STAGES,
        num_warps=4,
    )
    return outs
