"""Geometry of the `skinny_matmul` kernel: sizes, dtypes and limits; host code."""

from dataclasses import dataclass
from math import ceil

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.formats.few_bits import FewBits

MOST_ROWS = 64
# Bytes of a row of the weight in one piece, which is the widest swizzle; and 16-bit elements of x in as many bytes.
PIECE_BYTES, PIECE = 128, 64


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of x that a block multiplies; under the fixed order of sums a call may have several groups of them.
        out: columns of the result.
        inner: size of the contraction.
        gated: whether the weight has two rows for each column, those of the gates first.
        dtype: dtype of x.
        stored: dtype of the weight.
    """

    rows: int
    out: int
    inner: int
    gated: bool
    dtype: DTypeLike
    stored: DTypeLike

    @classmethod
    def of(cls, weight: ArrayOrStruct | FewBits, x: ArrayOrStruct, *, gated: bool) -> "Geometry":
        """Returns the geometry of these arrays."""
        out = weight.shape[0] // (2 if gated else 1)
        rows = min(x.shape[0], MOST_ROWS) if is_fixed() else x.shape[0]
        stored = x.dtype if isinstance(weight, FewBits) else weight.dtype
        return cls(rows, out, x.shape[1], gated, x.dtype, stored)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if self.stored != self.dtype and not self.packed:
            return f"the weight must have x's dtype, {self.dtype}, or 8 bits, got {self.stored}"
        if self.rows > MOST_ROWS:
            return f"at most {MOST_ROWS} rows, got {self.rows}"
        if self.inner % self.piece:
            return f"the inner size must be a multiple of {self.piece}, got {self.inner}"
        if self.out % ROW_TILE or self.out < WGMMA_ROWS:
            return f"the result must have a multiple of {ROW_TILE} columns, at least {WGMMA_ROWS}, got {self.out}"
        return None

    @property
    def packed(self) -> bool:
        """Whether the weight has 8 bits, which the kernel converts to float16 in registers."""
        return jnp.dtype(self.stored).name in LARGEST

    @property
    def operand(self) -> DTypeLike:
        """Dtype of wgmma operands. 8-bit values become float16, since no instruction converts them to bfloat16."""
        return jnp.dtype(jnp.float16) if self.packed else self.dtype

    @property
    def piece(self) -> int:
        """Elements of a row of the weight in one piece."""
        return PIECE_BYTES // jnp.dtype(self.stored).itemsize

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
        return self.parts * self.out * self.inner * jnp.dtype(self.stored).itemsize
