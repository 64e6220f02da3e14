"""Geometry (sizes, limits) and schedule (windows, tiles, stages) of the `grouped_matmul` kernel; host code.

Terms: a *window* is a run of rows of x that is multiplied at once. A *visit* is a window and one group with rows in it.
A *tile* is the columns of the result that a block computes of a visit. A *turn* is one iteration over the contraction,
and a *chunk* its elements. A *slot* is a pipeline stage in shared memory, which holds one turn.
"""

from dataclasses import dataclass, replace
from math import ceil

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    RESERVED_BYTES_PER_BLOCK,
    ROW_TILE,
    SHARED_ALIGNMENT,
    SHARED_BYTES,
    SHARED_BYTES_PER_BLOCK,
    WGMMA_ROWS,
)
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.mosaic.few_bits_turn import Packing
from pallas_kernels.mosaic.jax_versions import honours_register_requests

# 16-bit elements in the widest swizzle.
PIECE = 64
# Columns of sums that are staged at once.
STAGED = 64
# Left operand -> padding elements after each staged row, against bank conflicts along a column.
PADDING = {"weight": 2, "rows": 8}
# Most columns (N) of one wgmma.
_MOST_WIDTH = 256
_MOST_CONSUMERS = 2
# Of a weight in few bits whose scales multiply its numbers, with windows of up to 64 rows: at most 128 registers hold
# all that a consumer needs, and 512 threads have as many.
_MOST_CONSUMERS_OF_WIDENED = 3
# Shared memory of mbarriers, and of Mosaic's own scratch.
_OTHER_BYTES = 2048 + 512
# Most pipeline stages; more do not increase the bandwidth.
_MOST_STAGES = 8
# Of a weight in few bits: most bytes of a row per turn, and stages that turns should leave room for and at most have.
_FEW_BITS_BYTES, _FEWEST_STAGES, _MOST_STAGES_OF_FEW_BITS = 128, 3, 12
# Most rows of x, added up over the sums of a turn that are scaled apart, where consumers have as many registers as the
# producer (168).
_MOST_SCALED = 192
# Windows of few rows, with which the weight is the left operand.
_NARROW_WINDOWS = (16, 32, 64)
_WIDE_WINDOW, _WIDE_COLUMNS = 128, (256, 192, 128)
# Most rows between the start of a group's first window and its first row.
_MOST_OFFSET = ROW_TILE - 1


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of x, over all groups.
        groups: number of matrices of the weight.
        out: columns of the result.
        inner: size of the contraction.
        group_axis: axis of the weight that counts its matrices: 0, or 1 if the matrices' rows are interleaved.
        dtype: dtype of x.
        result: dtype of the result.
        packing: form of a weight in few bits; `None` for one of x's dtype.
    """

    rows: int
    groups: int
    out: int
    inner: int
    group_axis: int
    dtype: DTypeLike
    result: DTypeLike
    packing: Packing | None = None

    @classmethod
    def of(
        cls,
        weight: ArrayOrStruct | FewBits,
        x: ArrayOrStruct,
        *,
        group_axis: int,
        result: DTypeLike | None,
    ) -> "Geometry":
        """Returns the geometry of these arrays."""
        groups, out = weight.shape[group_axis], weight.shape[1 - group_axis]
        result = jnp.dtype(x.dtype if result is None else result)
        packing = Packing.of(weight) if isinstance(weight, FewBits) else None
        return cls(x.shape[0], groups, out, x.shape[1], group_axis, x.dtype, result, packing)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if self.result not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the result must be bfloat16, float16 or float32, got {self.result}"
        if not self.inner or self.inner % PIECE:
            return f"the inner size must be a multiple of {PIECE}, got {self.inner}"
        if self.out < WGMMA_ROWS or self.out % ROW_TILE:
            return f"the weight must have a multiple of {ROW_TILE} rows, at least {WGMMA_ROWS}, got {self.out}"
        if not self.rows or not self.groups:
            return f"there must be rows and groups, got {self.rows} rows and {self.groups} groups"
        return None if self.packing is None else self.packing.refusal()

    @property
    def bits(self) -> int:
        """Bits of a number of the weight."""
        return 16 if self.packing is None else self.packing.bits

    @property
    def is_widened(self) -> bool:
        """Whether the weight is in few bits, and its scales multiply its numbers."""
        return self.packing is not None and self.packing.scales_exactly(self.dtype)

    @property
    def widest(self) -> int:
        """Rows of the widest window."""
        is_wide = self.packing is None or self.is_widened
        return _WIDE_WINDOW if is_wide else _NARROW_WINDOWS[-1]

    def most_consumers(self, window: int) -> int:
        """Returns the most consumer warpgroups whose registers an SM has."""
        are_few = self.is_widened and window <= _NARROW_WINDOWS[-1]
        return _MOST_CONSUMERS_OF_WIDENED if are_few else _MOST_CONSUMERS


@dataclass(frozen=True)
class Schedule:
    """The division of a product into tiles, turns and blocks.

    It depends on static shapes only, so a row's result does not depend on the other rows.

    Attributes:
        window: rows of x that are multiplied at once.
        columns: columns of the result per tile.
        left: left operand of the products, "weight" or "rows"; each consumer warpgroup has 64 rows of it.
        chunk: elements along the contraction per turn.
        stages: pipeline stages (slots), the turns in flight.
        blocks: most persistent blocks; block b processes the pairs of visit and tile b, b + blocks, ...
    """

    window: int
    columns: int
    left: str
    chunk: int
    stages: int
    blocks: int

    @classmethod
    def by_rule(cls, geometry: Geometry) -> "Schedule":
        """Returns the schedule for these sizes; there are no tuned ones.

        The window is the narrowest that holds twice a group's mean number of rows at any alignment, or else the wide
        one. With narrow windows reading the weights dominates, and each is fetched about once. With the wide window
        the tensor cores dominate, and tiles are as large as the registers of two warpgroups allow. Under the fixed
        order of sums the weight is the left operand with every window: the window then changes no bit.
        """
        mean = geometry.rows / geometry.groups
        wanted = 2 * mean + _MOST_OFFSET
        window = next((width for width in _NARROW_WINDOWS if width >= wanted), _WIDE_WINDOW)
        if geometry.packing is not None:
            # The weight is always the left operand, which is widened in registers. A visit of a wide window takes 1.35
            # times as long as one of 64 rows.
            is_wide = geometry.is_widened and mean >= _NARROW_WINDOWS[-1]
            return cls._of_few_bits(
                geometry, _WIDE_WINDOW if is_wide else min(window, _NARROW_WINDOWS[-1])
            )
        resident = 1
        if window == _WIDE_WINDOW and not is_fixed():
            whole = [columns for columns in _WIDE_COLUMNS if geometry.out % columns == 0]
            columns = whole[0] if whole else min(_WIDE_COLUMNS[0], geometry.out // PIECE * PIECE)
            left, chunk = "rows", PIECE
        else:
            left, chunk = "weight", 2 * PIECE
            tall = window > _NARROW_WINDOWS[1] or geometry.inner % chunk
            columns = 2 * WGMMA_ROWS if tall and geometry.out >= 2 * WGMMA_ROWS else WGMMA_ROWS
            chunk = PIECE if tall else chunk
            resident = 2 if window <= _NARROW_WINDOWS[1] else 1
        empty = cls(window, columns, left, chunk, 0, 1)
        room = SHARED_BYTES // resident - RESERVED_BYTES_PER_BLOCK
        room = min(room, SHARED_BYTES_PER_BLOCK) - empty.shared_bytes(geometry)
        stages = min(room // empty.slot_bytes(geometry), _MOST_STAGES)
        return cls(window, columns, left, chunk, stages, resident * NUM_MULTIPROCESSORS)

    @classmethod
    def _of_few_bits(cls, geometry: Geometry, window: int) -> "Schedule":
        """Returns the schedule for a weight in few bits: one block per SM, whose registers the consumers fill."""
        packing = geometry.packing
        assert packing is not None
        most = _FEW_BITS_BYTES * 8 // geometry.bits
        chunks = [chunk for chunk in range(PIECE, most + 1, PIECE) if geometry.inner % chunk == 0]
        # Under the fixed order turns, and with them the sums that are scaled, are equal for all windows.
        widest = geometry.widest if is_fixed() else window
        is_wide = widest > _NARROW_WINDOWS[0]
        if is_wide and not geometry.is_widened and not honours_register_requests():
            chunks = [
                each for each in chunks if each // packing.span(each) * widest <= _MOST_SCALED
            ]
        fitting = [
            each
            for each in chunks
            if cls._with_stages(geometry, widest, each).stages >= _FEWEST_STAGES
        ]
        return cls._with_stages(geometry, window, (fitting or chunks[:1])[-1])

    @classmethod
    def _with_stages(cls, geometry: Geometry, window: int, chunk: int) -> "Schedule":
        """Returns the schedule for a weight in few bits with as many stages as shared memory holds."""
        consumers = min(geometry.most_consumers(window), geometry.out // WGMMA_ROWS)
        columns = consumers * WGMMA_ROWS
        empty = cls(window, columns, "weight", chunk, 0, NUM_MULTIPROCESSORS)
        room = SHARED_BYTES_PER_BLOCK - empty.shared_bytes(geometry)
        stages = min(room // empty.slot_bytes(geometry), _MOST_STAGES_OF_FEW_BITS)
        return replace(empty, stages=stages)

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run under this schedule, or `None` if it can."""
        if self.left not in PADDING:
            return f"left must be one of {', '.join(PADDING)}, got {self.left!r}"
        if min(self.window, self.columns, self.chunk, self.blocks) < 1 or self.stages < 2:
            return f"a schedule needs at least two stages, and at least 1 in all other fields, got {self}"
        if self.window % ROW_TILE or self.window & (self.window - 1):
            return f"a window must be a power of two and at least {ROW_TILE}, got {self.window}"
        height, width = self.height, self.width
        most = geometry.most_consumers(self.window) * WGMMA_ROWS
        if height % WGMMA_ROWS or height > most:
            return f"the left operand must have a multiple of {WGMMA_ROWS} rows, at most {most}, got {height}"
        if width % ROW_TILE or width > _MOST_WIDTH:
            return f"the right operand must have a multiple of {ROW_TILE} columns up to {_MOST_WIDTH}, got {width}"
        if self.left == "rows" and self.columns % STAGED:
            return (
                f"with rows on the left, columns must be a multiple of {STAGED}, got {self.columns}"
            )
        if geometry.packing is not None and (self.left == "rows" or width > geometry.widest):
            return f"a weight in few bits must be on the left, of at most {geometry.widest} rows, got {self}"
        if self.columns > geometry.out:
            return f"a tile of {self.columns} columns is wider than the result, {geometry.out}"
        if self.chunk % PIECE or geometry.inner % self.chunk:
            return f"a contraction of {geometry.inner} is not a multiple of chunks of {self.chunk}"
        if self.shared_bytes(geometry) > SHARED_BYTES_PER_BLOCK:
            return f"it needs {self.shared_bytes(geometry)} bytes of shared memory"
        return None

    @property
    def height(self) -> int:
        """Rows of the left operand, over all warpgroups."""
        return self.columns if self.left == "weight" else self.window

    @property
    def width(self) -> int:
        """Columns of the right operand."""
        return self.window if self.left == "weight" else self.columns

    @property
    def consumers(self) -> int:
        """Number of consumer warpgroups."""
        return self.height // WGMMA_ROWS

    def turns(self, geometry: Geometry) -> int:
        """Returns the number of turns per pair."""
        return geometry.inner // self.chunk

    def tiles(self, geometry: Geometry) -> int:
        """Returns the number of tiles per visit.

        The last tile is shifted left so that it is whole; where two tiles overlap, both store the same bits.
        """
        return ceil(geometry.out / self.columns)

    def padded_rows(self, geometry: Geometry) -> int:
        """Returns the rows of x after padding, so that every window is within bounds."""
        return max(self.window, ceil(geometry.rows / ROW_TILE) * ROW_TILE)

    def visits(self, geometry: Geometry) -> int:
        """Returns the most visits for any sizes of groups.

        Each group with rows has one visit, and each further visit needs at least the rows that a window holds at the
        worst alignment.
        """
        whole = max(1, self.window - _MOST_OFFSET + 1)
        return min(geometry.groups, geometry.rows) + geometry.rows // whole

    def grid(self, geometry: Geometry) -> int:
        """Returns the number of blocks of the launch."""
        return min(self.blocks, self.visits(geometry) * self.tiles(geometry))

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one stage."""
        rows = self.window * self.chunk * jnp.dtype(geometry.dtype).itemsize
        return self.columns * self.chunk * geometry.bits // 8 + rows

    def staged_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the staged sums: consumers x rows of the left operand x columns with padding."""
        return self.consumers, WGMMA_ROWS, min(self.width, STAGED) + PADDING[self.left]

    def staged_dtype(self, geometry: Geometry) -> DTypeLike:
        """Returns the dtype of staged sums; those read along columns, one element at a time, stay float32."""
        return jnp.dtype(jnp.float32) if self.left == "weight" else geometry.result

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory of one block in bytes."""
        consumers, rows, width = self.staged_shape()
        staged = consumers * rows * width * jnp.dtype(self.staged_dtype(geometry)).itemsize
        staged = ceil(staged / SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        return self.stages * self.slot_bytes(geometry) + staged + _OTHER_BYTES
