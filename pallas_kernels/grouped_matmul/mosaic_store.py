"""How the `grouped_matmul` kernel stores some rows of a warpgroup's sums: through shared memory, by powers of two.

How many rows are a visit's own only the device knows, and no store may touch a neighbour's. So their number is taken
apart into powers of two, each of which has a store of its own that runs or does not.
"""

from collections.abc import Callable

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, row_pieces

# Columns of a row that a warp takes number by number.
_WARP = 32


def store_right_rows(
    out: Ref, sums: Array, staged: Ref, first: Array, low: Array, high: Array, column: Array
) -> None:
    """Stores rows that stand on the right, the columns of `sums`.

    Args:
        out: [rows, columns] in global memory.
        sums: [columns, window], from a column and from the row `first` on.
        staged: float32 in shared memory, one column wider at least, this warpgroup's own.
        first: the window's first row.
        low: the first row to store.
        high: the row after the last.
        column: the first column.
    """
    height, window = sums.shape
    _stage(staged.at[:, pl.ds(0, window)], sums)

    def store(start: Array, size: int) -> None:
        rows = pl.ds(start - first, size)
        for begin in range(0, height, _WARP):
            (piece,) = row_pieces(size, _WARP, 1)
            source = staged.at[pl.ds(begin, _WARP), rows].transpose((1, 0))
            found = plgpu.load(source, layout=piece.layout, optimized=False)
            out[pl.ds(start, size), pl.ds(column + begin, _WARP)] = found.astype(out.dtype)

    _by_powers(window, low, high, store)
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
    """Stores rows that stand on the left, those of `sums`, so many columns at a time.

    Args:
        out: [rows, columns] in global memory.
        sums: [rows, columns], from the row `first` and from a column on.
        staged: [rows, at least `width`] of out's dtype in shared memory, this warpgroup's own.
        first: the row of the result that the first of `sums` is.
        low: the first row to store, which may lie outside of `sums`, like the next.
        high: the row after the last.
        column: the first column.
        width: columns at a time.
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
            out[pl.ds(start, size), pl.ds(column + begin, width)] = found

        _by_powers(height, low, high, store)
        plgpu.commit_smem()


def _stage(staged: Ref, sums: Array) -> None:
    """Puts sums where all threads of the warpgroup see them."""
    staged[...] = sums
    plgpu.commit_smem()


def _by_powers(most: int, low: Array, high: Array, store: Callable[[Array, int], None]) -> None:
    """Calls `store` of a row and a power of two for runs of rows that together are low to high, at most `most`."""
    count = high - low
    size = 1 << most.bit_length() - 1
    while size:
        start = low + (count & -(2 * size))

        @pl.when((count > 0) & (count & size != 0))
        def _(start: Array = start, size: int = size) -> None:
            store(start, size)

        size //= 2
