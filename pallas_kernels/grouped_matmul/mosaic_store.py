"""Stores of a dynamic number of rows of a warpgroup's sums, through shared memory.

The number of a visit's own rows is known only on the device, and no store may touch rows of other groups. So the number
is decomposed into powers of two, each of which has its own conditional store.
"""

from collections.abc import Callable

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, row_pieces

# Columns of a row that a warp stores, one element per lane.
_WARP = 32


def store_right_rows(
    out: Ref,
    sums: Array,
    staged: Ref,
    first: Array,
    low: Array,
    high: Array,
    column: Array,
    width: int,
) -> None:
    """Stores rows of x that were the right operand, which are the columns of `sums`, up to `width` of them at a time.

    Args:
        out: [rows, columns] in global memory.
        sums: [columns, window]; element [0, 0] belongs at `out[first, column]`.
        staged: this warpgroup's float32 buffer in shared memory, [columns, more than the window or `width`].
        first: first row of the window.
        low: first row to store.
        high: one past the last row to store.
        column: first column of `sums` in `out`.
        width: rows that are staged at a time.
    """
    height, window = sums.shape
    width = min(width, window)
    for place in range(0, window, width):
        _stage(staged.at[:, pl.ds(0, width)], sums[:, place : place + width])
        start_of_part = first + place

        def store(start: Array, size: int, start_of_part: Array = start_of_part) -> None:
            rows = pl.ds(start - start_of_part, size)
            for begin in range(0, height, _WARP):
                (piece,) = row_pieces(size, _WARP, 1)
                source = staged.at[pl.ds(begin, _WARP), rows].transpose((1, 0))
                found = plgpu.load(source, layout=piece.layout, optimized=False)
                span = pl.ds(column + begin, _WARP)
                assign(out, (pl.ds(start, size), span), found.astype(out.dtype))

        own_low = jnp.maximum(low, start_of_part)
        own_high = jnp.minimum(high, start_of_part + width)
        _by_powers(width, own_low, own_high, store)
        plgpu.commit_smem()


def store_left_rows(
    out: Ref,
    sums: Array,
    staged: Ref,
    first: Array,
    low: Array,
    high: Array,
    column: Array,
    width: int,
) -> None:
    """Stores rows of x that were the left operand, which are the rows of `sums`, `width` columns at a time.

    Args:
        out: [rows, columns] in global memory.
        sums: [rows, columns]; element [0, 0] belongs at `out[first, column]`.
        staged: this warpgroup's buffer in shared memory, [rows, at least `width`] in out's dtype.
        first: first row of `sums` in `out`.
        low: first row to store; may be outside of `sums`.
        high: one past the last row to store; may be outside of `sums`.
        column: first column of `sums` in `out`.
        width: columns that are staged at a time.
    """
    height, columns = sums.shape
    low, high = jnp.maximum(low, first), jnp.minimum(high, first + height)
    vector = LOAD_BYTES // jnp.dtype(out.dtype).itemsize
    for begin in range(0, columns, width):
        _stage(staged.at[:, pl.ds(0, width)], sums[:, begin : begin + width].astype(out.dtype))

        def store(start: Array, size: int, begin: int = begin) -> None:
            (piece,) = row_pieces(size, width, vector)
            source = staged.at[pl.ds(start - first, size), pl.ds(0, width)]
            found = plgpu.load(source, layout=piece.layout, optimized=False)
            assign(out, (pl.ds(start, size), pl.ds(column + begin, width)), found)

        _by_powers(height, low, high, store)
        plgpu.commit_smem()


def _stage(staged: Ref, sums: Array) -> None:
    """Writes sums to shared memory and makes them visible to all threads of the warpgroup."""
    assign(staged, ..., sums)
    plgpu.commit_smem()


def _by_powers(most: int, low: Array, high: Array, store: Callable[[Array, int], None]) -> None:
    """Calls `store(start, size)` for runs of power-of-two sizes that cover the rows [low, high), at most `most`."""
    count = high - low
    size = 1 << most.bit_length() - 1
    while size:
        start = low + (count & -(2 * size))

        @pl.when((count > 0) & (count & size != 0))
        def _(start: Array = start, size: int = size) -> None:
            store(start, size)

        size //= 2
