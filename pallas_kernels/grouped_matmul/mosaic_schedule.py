"""The sizes of the Mosaic GPU kernel of `grouped_matmul`, and how it cuts the work. Traces nothing.

Words: a *window* is a run of rows of x that is multiplied at once, a *visit* a window and the group it is visited for,
a *tile* as many columns of the result as a block computes of a visit, a *chunk* the numbers along the contraction that
it takes in one turn. What a turn fetches lies in a *slot* of shared memory.
"""

from dataclasses import dataclass
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

# Numbers of 16 bits in the widest swizzle.
PIECE = 64
# Columns that are staged at once for the rows of a result, when they stand on the left.
STAGED = 64
# Numbers after each staged row, so that neighbours down a column lie in different banks.
PADDING = {"weight": 2, "rows": 8}
# Widest right operand of one wgmma.
_MOST_WIDTH = 256
_MOST_CONSUMERS = 2
# Barriers, and the scratch that Mosaic adds.
_OTHER_BYTES = 2048 + 512
# Most slots: more than these hold nothing that the memory would wait for.
_MOST_STAGES = 8
# Windows of few rows: with one of them the weight stands on the left.
_NARROW_WINDOWS = (16, 32, 64)
_WIDE_WINDOW, _WIDE_COLUMNS = 128, (256, 192, 128)
# Rows by which a group may miss the beginning of its first window.
_MOST_OFFSET = ROW_TILE - 1


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from.

    Attributes:
        rows: of x, over all groups.
        groups: how many matrices the weight holds.
        out: columns of the result.
        inner: numbers that each of them is a sum over.
        group_axis: axis of the weight that counts its matrices: 0, or 1 if each of their rows lies among the others'.
        dtype: of x and the weight.
        result: of the result.
    """

    rows: int
    groups: int
    out: int
    inner: int
    group_axis: int
    dtype: DTypeLike
    result: DTypeLike

    @classmethod
    def of(
        cls,
        weight: ArrayOrStruct,
        x: ArrayOrStruct,
        *,
        group_axis: int,
        result: DTypeLike | None,
    ) -> "Geometry":
        """Returns the sizes of these arrays."""
        groups, out = weight.shape[group_axis], weight.shape[1 - group_axis]
        result = jnp.dtype(x.dtype if result is None else result)
        return cls(x.shape[0], groups, out, x.shape[1], group_axis, x.dtype, result)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if self.result not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the result must be bfloat16, float16 or float32, got {self.result}"
        if not self.inner or self.inner % PIECE:
            return f"the inner size must be a multiple of {PIECE}, got {self.inner}"
        if self.out < WGMMA_ROWS or self.out % ROW_TILE:
            return f"the weight must have {WGMMA_ROWS} rows or more, a multiple of {ROW_TILE}, got {self.out}"
        if not self.rows or not self.groups:
            return f"there must be rows and groups, got {self.rows} and {self.groups}"
        return None


@dataclass(frozen=True)
class Schedule:
    """How the work is cut: a function of static shapes only, so that rows never see each other.

    Attributes:
        window: rows of x that are multiplied at once.
        columns: of the result per tile.
        left: what stands on the left of the products, "weight" or "rows"; each 64 of it are a warpgroup's.
        chunk: numbers along the contraction per turn.
        stages: slots, the turns that are in flight.
        blocks: most blocks; each takes every so many-th pair of visit and tile.
    """

    window: int
    columns: int
    left: str
    chunk: int
    stages: int
    blocks: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Schedule":
        """Chooses the window that holds twice a group's share of the rows wherever it begins, or else the widest.

        As long as windows are narrow a group's weights are the work, and they are fetched once. With wide ones the
        tensor cores are busy, and tiles are as large as the registers of two warpgroups hold.
        """
        wanted = 2 * geometry.rows / geometry.groups + _MOST_OFFSET
        window = next((width for width in _NARROW_WINDOWS if width >= wanted), _WIDE_WINDOW)
        resident = 1
        if window == _WIDE_WINDOW:
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

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run under this schedule, or `None` if it can."""
        if self.left not in PADDING:
            return f"left must be one of {', '.join(PADDING)}, got {self.left!r}"
        if min(self.window, self.columns, self.chunk, self.blocks) < 1 or self.stages < 2:
            return f"a schedule needs two stages and at least 1 of everything else, got {self}"
        if self.window % ROW_TILE or self.window & (self.window - 1):
            return f"a window must be a power of two from {ROW_TILE} on, got {self.window}"
        height, width = self.height, self.width
        if height % WGMMA_ROWS or height > _MOST_CONSUMERS * WGMMA_ROWS:
            return f"{WGMMA_ROWS} or {_MOST_CONSUMERS * WGMMA_ROWS} must stand on the left, got {height}"
        if width % ROW_TILE or width > _MOST_WIDTH:
            return f"up to {_MOST_WIDTH} in steps of {ROW_TILE} may stand on the right, got {width}"
        if self.left == "rows" and self.columns % STAGED:
            return f"columns on the right must be a multiple of {STAGED}, got {self.columns}"
        if self.columns > geometry.out:
            return f"a tile of {self.columns} columns is wider than the result, {geometry.out}"
        if self.chunk % PIECE or geometry.inner % self.chunk:
            return f"{geometry.inner} numbers cannot be cut into chunks of {self.chunk}"
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
        """Warpgroups that multiply."""
        return self.height // WGMMA_ROWS

    def turns(self, geometry: Geometry) -> int:
        """Returns how many chunks a sum takes."""
        return geometry.inner // self.chunk

    def tiles(self, geometry: Geometry) -> int:
        """Returns how many tiles a visit has.

        The last one begins early, so that it is whole, and two of them store the same bits where they meet.
        """
        return ceil(geometry.out / self.columns)

    def padded_rows(self, geometry: Geometry) -> int:
        """Returns the rows of x with what a window needs past the end."""
        return max(self.window, ceil(geometry.rows / ROW_TILE) * ROW_TILE)

    def visits(self, geometry: Geometry) -> int:
        """Returns how many visits there are at most, whatever the sizes of groups.

        One for each group that has rows; one more takes as many rows as a window holds wherever a group begins.
        """
        whole = max(1, self.window - _MOST_OFFSET + 1)
        return min(geometry.groups, geometry.rows) + geometry.rows // whole

    def grid(self, geometry: Geometry) -> int:
        """Returns how many blocks are launched."""
        return min(self.blocks, self.visits(geometry) * self.tiles(geometry))

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one slot."""
        itemsize = jnp.dtype(geometry.dtype).itemsize
        return (self.columns + self.window) * self.chunk * itemsize

    def staged_shape(self) -> tuple[int, int, int]:
        """Returns the shape of what each warpgroup stages of its sums: rows of the left by columns of the right."""
        width = self.width if self.left == "weight" else STAGED
        return self.consumers, WGMMA_ROWS, width + PADDING[self.left]

    def staged_dtype(self, geometry: Geometry) -> DTypeLike:
        """Returns the dtype of staged sums; what is read by columns is read number by number, as it is."""
        return jnp.dtype(jnp.float32) if self.left == "weight" else geometry.result

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory that one block asks for."""
        consumers, rows, width = self.staged_shape()
        staged = consumers * rows * width * jnp.dtype(self.staged_dtype(geometry)).itemsize
        staged = ceil(staged / SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        return self.stages * self.slot_bytes(geometry) + staged + _OTHER_BYTES
