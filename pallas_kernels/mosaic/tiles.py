"""Operand tiles of wgmma: register layouts, shared-memory transforms, broadcasts, and one blocking product."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.private_types import Layout, Ref

# The transform classes are private to JAX, so they have no types.
_transform: Any = plgpu

WGMMA: Layout = plgpu.Layout.WGMMA
"""Register layout of a wgmma accumulator [64 n, 8 m]."""
PER_ROW: Layout = WGMMA.reduce(1)
"""Register layout of one value per row of an accumulator."""
PER_COLUMN: Layout = WGMMA.reduce(0)
"""Register layout of one value per column of an accumulator."""


def swizzled(width: int, dtype: DTypeLike, largest: int = 128) -> tuple[Any, ...]:
    """Returns the transforms (tiling, swizzle of at most `largest` bytes) of a tile of rows of `width` elements."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle_of(width * itemsize, largest)
    return _transform.TilingTransform((ROW_TILE, swizzle // itemsize)), *untiled_swizzle(swizzle)


def untiled_swizzle(swizzle: int) -> tuple[Any, ...]:
    """Returns the transforms of an array that is swizzled by `swizzle` bytes and not tiled."""
    return (_transform.SwizzleTransform(swizzle),)


def swizzle_of(row_bytes: int, largest: int = 128) -> int:
    """Returns the widest swizzle in bytes, at most `largest`, that divides `row_bytes`."""
    return largest if row_bytes % largest == 0 else swizzle_of(row_bytes, largest // 2)


def over_rows(vector: Array, rows: int) -> Array:
    """Repeats one value per column over `rows` rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])


def over_columns(vector: Array, columns: int) -> Array:
    """Repeats one value per row over `columns` columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def column_groups(tile: Array) -> list[Array]:
    """Cuts a tile into groups of 8 columns; each thread holds the same columns of every group."""
    return [
        lax.slice(tile, (0, start), (tile.shape[0], start + ROW_TILE))
        for start in range(0, tile.shape[1], ROW_TILE)
    ]


def multiply(left: Ref, right: Ref, *, meanwhile: Callable[[], None]) -> Array:
    """Returns the float32 product of two tiles in shared memory; `meanwhile` runs between its issue and the wait."""

    def product(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, left, right)
        meanwhile()
        return accumulator[...]

    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
