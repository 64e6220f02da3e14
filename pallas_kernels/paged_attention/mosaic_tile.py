"""Small steps of the decode kernel on tiles in registers and shared memory. Knows neither rows nor pages."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.mosaic_schedule import ROW_TILE

# Refs have types that are private to JAX, and so has what makes their transforms whole classes.
Ref = Any
Layout = Any
_transform: Any = plgpu

WGMMA = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def swizzled(width: int, dtype: DTypeLike, largest: int = 128) -> tuple[Any, ...]:
    """Returns the transforms of a tile whose rows hold `width` elements."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle_of(width * itemsize, largest)
    tiling = _transform.TilingTransform((ROW_TILE, swizzle // itemsize))
    return tiling, _transform.SwizzleTransform(swizzle)


def swizzle_of(row_bytes: int, largest: int = 128) -> int:
    """Returns in how wide pieces rows of so many bytes are swizzled."""
    return largest if row_bytes % largest == 0 else swizzle_of(row_bytes, largest // 2)


def over_rows(vector: Array, rows: int) -> Array:
    """Repeats one value per column over `rows` rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])


def over_columns(vector: Array, columns: int) -> Array:
    """Repeats one value per row over `columns` columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def multiply(left: Ref, right: Ref, *, meanwhile: Callable[[], None]) -> Array:
    """Returns the product of two tiles in shared memory, in float32; `meanwhile` runs while it is computed."""

    def product(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, left, right)
        meanwhile()
        return accumulator[...]

    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
