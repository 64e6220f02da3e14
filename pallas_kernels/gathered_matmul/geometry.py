"""Sizes of `gathered_matmul` on Hopper, and how its columns are divided among warps or blocks."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue
from pallas_kernels.mosaic.few_bits import SCALES
from pallas_kernels.mosaic.packed_numbers import BITS
from pallas_kernels.mosaic.per_thread import LINES, MOST_PLACES, WORDS
from pallas_kernels.mosaic.warps import WARPS

WORD = 32
"""Bits of a word."""
_MOST_KEPT = 96 * 1024
"""Most numbers of x that a block keeps in shared memory beside a weight of 4 bits: 192 KiB."""

MOST_ROWS = 8
"""Most rows of the weight that a warp reads at once, if its lanes multiply."""
_BYTES = 4096
"""Bytes of the weight that such a warp reads at least if it reads several rows."""
# Most columns of a sum over choices that a warp computes, and the warps that a GPU needs.
_MOST_COLUMNS, _ENOUGH_WARPS = 4, 1320


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of choices.
        count: choices of each row.
        groups: number of matrices of the weight.
        out: columns of the result.
        inner: size of the contraction.
        group_axis: axis of the weight that counts its matrices.
        dtype: dtype of x.
        kind: dtype of the weight, or the name of its code.
        scales: number of scales of a row of the weight; 0 without any.
        scale: their dtype; `None` without any.
        has_zeros: whether there are zero points.
        each: whether x has a row for each choice, not for each row of choices.
        summed: whether the result is a weighted sum over a row's choices.
        bias: dtype of the bias; `None` without.
        epilogue: what becomes of the sums.
    """

    rows: int
    count: int
    groups: int
    out: int
    inner: int
    group_axis: int
    dtype: DTypeLike
    kind: str
    scales: int = 0
    scale: DTypeLike | None = None
    has_zeros: bool = False
    each: bool = False
    summed: bool = False
    bias: DTypeLike | None = None
    epilogue: Epilogue = SUMS

    @classmethod
    def of(
        cls,
        weight: ArrayOrStruct | FewBits,
        x: ArrayOrStruct,
        chosen: ArrayOrStruct,
        *,
        group_axis: int,
    ) -> "Geometry":
        """Returns the geometry of these arrays."""
        (rows, count), (*_, inner) = chosen.shape, weight.shape
        groups, out = weight.shape[group_axis], weight.shape[1 - group_axis]
        is_few = isinstance(weight, FewBits)
        kind = weight.code if is_few else jnp.dtype(weight.dtype).name
        each = x.shape[0] != rows
        plain = cls(rows, count, groups, out, inner, group_axis, x.dtype, kind, each=each)
        if not is_few:
            return plain
        scales, has_zeros = weight.scales, weight.zeros is not None
        return replace(plain, scales=scales.shape[2], scale=scales.dtype, has_zeros=has_zeros)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if not self.rows * self.count * self.groups * self.out:
            return "there must be rows, choices, groups and columns"
        if not self.inner or self.inner % self.piece:
            return f"the inner size must be a multiple of {self.piece}, got {self.inner}"
        if self.scale is not None and jnp.dtype(self.scale).name not in SCALES:
            return f"scales must be {', '.join(SCALES)}, got {self.scale}"
        if self.scales > 1 and self.inner // self.scales % self.piece:
            return f"groups of columns must be multiples of {self.piece}, got {self.inner // self.scales}"
        if self.groups * self.out * self.words > MOST_PLACES:
            return f"the weight must have at most {MOST_PLACES} words"
        kept = self.count * self.inner if self.each else self.inner
        if self.is_tiled and kept > _MOST_KEPT:
            return f"a row of choices must have at most {_MOST_KEPT} numbers of x, got {kept}"
        rows_of_x = self.rows * (self.count if self.each else 1)
        if max(rows_of_x * self.inner, self.rows * self.count * self.out) > MOST_PLACES:
            return f"x and the result must have at most {MOST_PLACES} numbers"
        return None

    @property
    def piece(self) -> int:
        """Numbers of the weight in what a lane loads at once."""
        return WORDS * WORD // BITS[self.kind]

    @property
    def words(self) -> int:
        """Words of a row of the weight."""
        return self.inner * BITS[self.kind] // WORD

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.epilogue.columns(self.out)

    @property
    def is_tiled(self) -> bool:
        """Whether a block multiplies a tile with tensor cores (`mosaic_four_bits`); else a warp multiplies rows."""
        return BITS[self.kind] == 4

    @property
    def kept(self) -> int:
        """Words of x that the block of a tile keeps: of a row, or of one for each choice that it adds up."""
        return (self.count if self.summed and self.each else 1) * self.inner // 2

    @property
    def columns(self) -> int:
        """Columns of the result that a warp computes, of two rows of the weight each if products are gated.

        The columns of a tile are a block's.
        """
        if self.is_tiled:
            return LINES if self.summed or self.epilogue.gated else 2 * LINES
        if self.summed:
            columns = _MOST_COLUMNS
            while columns > 1 and self.rows * self.results < columns * _ENOUGH_WARPS:
                columns //= 2
            return columns
        few = max(1, min(MOST_ROWS, self.out, _BYTES // (4 * self.words)))
        rows = max(2 if self.out > 1 else 1, 1 << few.bit_length() - 1)
        return rows // 2 if self.epilogue.gated else rows

    @property
    def tasks(self) -> int:
        """Warps, or blocks with a tile, that have columns to compute."""
        return self.rows * (1 if self.summed else self.count) * ceil(self.results / self.columns)

    @property
    def blocks(self) -> int:
        """Blocks of the kernel."""
        return self.tasks if self.is_tiled else ceil(self.tasks / WARPS)

    @property
    def has_row_scales(self) -> bool:
        """Whether a row of the weight has one scale, which multiplies its whole sum."""
        return self.scales == 1 and not self.has_zeros

    def row(self, group: Any, column: Any) -> Any:  # noqa: ANN401 - words
        """Returns the row of the weight, of all groups, that a column of a group's sums is of."""
        return group * self.out + column if self.group_axis == 0 else column * self.groups + group
