"""Geometry of the `skinny_matmul` kernel: sizes, dtypes and limits; host code."""

from dataclasses import dataclass
from math import ceil

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.mosaic.few_bits_turn import Packing
from pallas_kernels.mosaic.tiles import swizzle_of

MOST_ROWS = 64
# Bytes of a row of x in a swizzled tile.
_SWIZZLE = 128


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of x that a block multiplies, at most 64 if a call of any number of rows is supported: under the
            fixed order of sums, and of a weight in few bits.
        out: columns of the result.
        inner: size of the contraction.
        gated: whether the weight has two rows for each column, those of the gates first.
        dtype: dtype of x.
        packing: form of a weight in few bits; `None` for one of x's dtype.
        rounds_rows: whether x is rounded to float8_e4m3fn, so that codes are multiplied as they lie.
    """

    rows: int
    out: int
    inner: int
    gated: bool
    dtype: DTypeLike
    packing: Packing | None = None
    rounds_rows: bool = False

    @classmethod
    def of(cls, weight: ArrayOrStruct | FewBits, x: ArrayOrStruct, *, gated: bool) -> "Geometry":
        """Returns the geometry of these arrays."""
        out = weight.shape[0] // (2 if gated else 1)
        packing = Packing.of(weight) if isinstance(weight, FewBits) else None
        any_number = packing is not None or is_fixed()
        rows = min(x.shape[0], MOST_ROWS) if any_number else x.shape[0]
        rounds = isinstance(weight, FewBits) and weight.rounds_rows
        return cls(rows, out, x.shape[1], gated, x.dtype, packing, rounds)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if self.rows > MOST_ROWS:
            return f"at most {MOST_ROWS} rows, got {self.rows}"
        if self.inner % self.turn:
            return f"the inner size must be a multiple of {self.turn}, got {self.inner}"
        if self.packing is not None and (problem := self.packing.refusal()) is not None:
            return problem
        if self.out % ROW_TILE or self.out < WGMMA_ROWS:
            return f"the result must have a multiple of {ROW_TILE} columns, at least {WGMMA_ROWS}, got {self.out}"
        return None

    @property
    def multiplied(self) -> DTypeLike:
        """Dtype of x as it is multiplied."""
        return jnp.float8_e4m3fn if self.rounds_rows else self.dtype

    @property
    def turn(self) -> int:
        """Columns of x that a row of a swizzled tile has, of which a piece has a multiple."""
        return _SWIZZLE // jnp.dtype(self.multiplied).itemsize

    @property
    def bits(self) -> int:
        """Bits of a number of the weight."""
        return 16 if self.packing is None else self.packing.bits

    def stored(self, columns: int) -> int:
        """Returns the elements of the weight's array that store adjacent columns of a row; a byte has two of 4 bits."""
        return columns // 2 if self.bits == 4 else columns

    @property
    def piece_bytes(self) -> int:
        """Bytes of a row of the weight in one piece, which is the widest swizzle that divides the row."""
        return swizzle_of(self.inner * self.bits // 8)

    @property
    def piece(self) -> int:
        """Numbers of a row of the weight in one piece."""
        return self.piece_bytes * 8 // self.bits

    @property
    def parts(self) -> int:
        """Rows of the weight for each column of the result."""
        return 2 if self.gated else 1

    @property
    def padded_rows(self) -> int:
        """Rows of x rounded up to a multiple of 8, N of the products."""
        return ceil(self.rows / ROW_TILE) * ROW_TILE

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.parts * self.out * self.inner * self.bits // 8
