"""Register layouts for rows in global memory: a warpgroup's 128 threads load up to 16 bytes each at a time.

Numbers of rows and lengths that are not powers of two are cut into pieces that are.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, gcd
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mosaic

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref, Slice

LOAD_BYTES = 16
_WARPS, _LANES = 4, 32
_THREADS = _WARPS * _LANES


@dataclass(frozen=True)
class Piece:
    """Adjacent rows, or adjacent elements of one row, that one load or store covers.

    Attributes:
        start: index of the first.
        size: how many, a multiple of the extent of `layout`.
        layout: register layout of the piece.
    """

    start: int
    size: int
    layout: Any


def load(ref: Ref, layout: Layout) -> Array:
    """Loads an array with one plain load per vector of a thread; the row's start need not be aligned."""
    return plgpu.load(ref, layout=layout, optimized=False)


def broadcast(vector: Array, shape: tuple[int, ...], axis: int, layout: Layout) -> Array:
    """Repeats one value per row (`axis` 0) or per column (`axis` 1)."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), layout)


def store_per_row(
    ref: Ref, rows: Slice, values: Array, *, lead: tuple[Array | int, ...] = ()
) -> None:
    """Stores one value per row at `ref[*lead, rows]`.

    A single row is stored as a scalar, because Mosaic infers no layout for a vector of one element.
    """
    if values.shape[0] == 1:
        assign(ref, (*lead, rows.start), jnp.max(values))
    else:
        assign(ref, (*lead, rows), values)


@cache
def row_pieces(rows: int, columns: int, vector: int) -> tuple[Piece, ...]:
    """Cuts rows into pieces in which one warp holds a whole row, with as few idle threads as possible.

    Args:
        rows: number of rows. Neither it nor the rows' stride in memory need be a power of two.
        columns: elements per row that one step covers, a power of two that divides the rows' width.
        vector: most adjacent elements per thread, a power of two.
    """
    vector = min(vector, columns)
    step = _THREADS * vector // columns
    sizes = [rows // step * step] if rows >= step else []
    rest = rows - sum(sizes)
    sizes += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        Piece(start, size, _rows_layout(min(size, step), columns, vector))
        for start, size in zip(starts, sizes, strict=True)
    )


def _rows_layout(rows: int, columns: int, vector: int) -> Any:  # noqa: ANN401 - private to JAX
    """Builds the layout of a piece; few rows get shorter vectors first, then several threads per element."""
    vector = max(min(vector, rows * columns // _THREADS), columns // _LANES, 1)
    lanes = columns // vector
    rows_per_warp = min(rows, _LANES // lanes)
    warps = min(rows // rows_per_warp, _WARPS)
    height = warps * rows_per_warp
    tiles = ((height, columns), (rows_per_warp, columns), (1, vector))
    return _layout(
        tiles,
        ((-6, warps), _WARPS // warps),
        ((-4, rows_per_warp), (-3, lanes), _LANES // (lanes * rows_per_warp)),
    )


@cache
def flat_pieces(length: int, itemsize: int) -> tuple[Piece, ...]:
    """Cuts one row of `length` elements of `itemsize` bytes; its address must be a multiple of its size in bytes."""
    vector = gcd(LOAD_BYTES // itemsize, length)
    step = _THREADS * vector
    sizes = [length // step * step] if length >= step else []
    rest = length - sum(sizes)
    sizes += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        Piece(start, size, _flat_layout(min(size, step), vector))
        for start, size in zip(starts, sizes, strict=True)
    )


def flat_registers(length: int, itemsize: int) -> int:
    """Returns the registers per thread that a row in `flat_pieces` takes; two vectors never share a register."""
    vector = gcd(LOAD_BYTES // itemsize, length)
    vectors = sum(ceil(piece.size / (_THREADS * vector)) for piece in flat_pieces(length, itemsize))
    return vectors * ceil(vector * itemsize / 4)


def _flat_layout(length: int, vector: int) -> Any:  # noqa: ANN401 - private to JAX
    vector = min(vector, length)
    lanes = min(length // vector, _LANES)
    warps = length // vector // lanes
    tiles = ((length,), (length // warps,), (vector,))
    return _layout(tiles, ((-3, warps), _WARPS // warps), ((-2, lanes), _LANES // lanes))


def _layout(tiles: tuple[tuple[int, ...], ...], warps: tuple, lanes: tuple) -> Any:  # noqa: ANN401 - private to JAX
    """Builds a tiled layout; a bare integer n in `warps` or `lanes` means that n of them hold the same elements."""

    def dims(parts: tuple) -> tuple:
        return tuple(
            plgpu.Replicated(part) if isinstance(part, int) else part[0]
            for part in parts
            if part != 1
        )

    # Pallas accepts canonical layouts only.
    found = mosaic.TiledLayout(
        plgpu.Tiling(tiles), dims(warps), dims(lanes), -1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)
