"""The sizes of the Mosaic GPU kernel of `skinny_matmul`, and how it cuts weights into pieces. Traces nothing.

Words: a *tile* is as many output columns as a block computes at once, a *chunk* the numbers along the contraction
that it takes in one turn. What a turn fetches lies in a *slot* of shared memory.
"""

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from math import ceil

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.byte_formats import LARGEST
from pallas_kernels.device import NUM_MULTIPROCESSORS, SHARED_BYTES, SHARED_BYTES_PER_BLOCK
from pallas_kernels.tuning import tuned

MOST_ROWS = 64
# Bytes of a row of the weight in one copy, the widest swizzle; and numbers of x in as many bytes.
PIECE_BYTES, PIECE = 128, 64
# Height of one wgmma, whose left operand the weights are.
HEIGHT = 64
# Rows that a copy into swizzled shared memory counts in.
ROW_TILE = 8
# Widest right operand of one wgmma.
_MOST_WIDTH = 256
# Sums that a warpgroup keeps in registers: 128 of each thread.
_MOST_SUMS = 16384
# Numbers after each row of sums in shared memory, so that a column of them lies in many banks.
PADDING = 2
ALIGNMENT = 1024
# Barriers, and the scratch that Mosaic adds.
OTHER_BYTES = 2048 + 512
_RESERVED_BYTES = 1024
# Blocks that share a multiprocessor at most before each works on several tiles instead.
_MOST_RESIDENT = 3
# Rows up to which stacked chunks take the tensor cores no time to speak of.
_FEW_ROWS = 16
# Blocks that are enough: for up to 8 rows of a large weight, else for few rows, and for many rows.
_ENOUGH_BLOCKS = (200, 128, 96)
_LARGE_BYTES = 24 * 2**20
# Slots that a block should have at least before chunks of two pieces, which take fewer copies, are worth it.
_LEAST_STAGES = 3


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from.

    Attributes:
        rows: of x.
        out: columns of the result.
        inner: numbers that each of them is a sum over.
        gated: the weight holds two rows for each column, those of the gates first.
        dtype: of x.
        stored: of the weight.
    """

    rows: int
    out: int
    inner: int
    gated: bool
    dtype: DTypeLike
    stored: DTypeLike

    @classmethod
    def of(cls, weight: Array, x: Array, *, gated: bool) -> "Geometry":
        """Returns the sizes of these arrays."""
        out = weight.shape[0] // (2 if gated else 1)
        return cls(x.shape[0], out, x.shape[1], gated, x.dtype, weight.dtype)

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
        if self.out % ROW_TILE or self.out < HEIGHT:
            return f"the result's columns must be a multiple of {ROW_TILE} from {HEIGHT} on, got {self.out}"
        return None

    @property
    def packed(self) -> bool:
        """Whether the weight has 8 bits, which are unpacked to float16 on the chip."""
        return jnp.dtype(self.stored).name in LARGEST

    @property
    def operand(self) -> DTypeLike:
        """Dtype of the products' inputs; one instruction makes float16 of two numbers of 8 bits, none bfloat16."""
        return jnp.dtype(jnp.float16) if self.packed else self.dtype

    @property
    def piece(self) -> int:
        """Numbers of a row of the weight in one piece."""
        return PIECE_BYTES // jnp.dtype(self.stored).itemsize

    @property
    def parts(self) -> int:
        """Rows of the weight for each column of the result."""
        return 2 if self.gated else 1

    @property
    def padded_rows(self) -> int:
        """Rows as the tensor cores take them."""
        return ceil(self.rows / ROW_TILE) * ROW_TILE

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.parts * self.out * self.inner * jnp.dtype(self.stored).itemsize


@dataclass(frozen=True)
class Schedule:
    """How the weight is cut: a function of static shapes only, so that rows never see each other.

    Attributes:
        columns: of the result per tile.
        folds: chunks that lie on top of each other in one turn, so that few columns fill the height of a product;
            their sums are joined at the end.
        depth: pieces of 128 bytes of a row of the weight per chunk.
        stages: slots, the turns that are in flight.
        splits: blocks that share a tile's contraction; XLA adds up what each found.
        blocks: most blocks for each split; with fewer blocks than tiles each works on several.
    """

    columns: int
    folds: int
    depth: int
    stages: int
    splits: int
    blocks: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Schedule":
        """Takes what was measured to be fastest for such shapes on this device, or else what the rules say."""
        fields = tuned("skinny_matmul", shape_class(geometry))
        if fields is not None and fields.keys() == {field.name for field in dataclass_fields(cls)}:
            schedule = cls(**fields)
            if schedule.refusal(geometry) is None:
                return schedule
        return cls.by_rule(geometry)

    @classmethod
    def by_rule(cls, geometry: Geometry) -> "Schedule":
        """Chooses what was fastest on an H200 for shapes like these (NOTES.md).

        All blocks are at work at once and hold as much in flight as shared memory allows. Tiles narrow enough for that
        are stacked by folds; splits, which take another launch, come last.
        """
        found = [cls._filled(geometry, *cut) for cut in _cuts(geometry)]
        able = [schedule for schedule in found if schedule.refusal(geometry) is None]
        return able[0] if able else cls(ROW_TILE, HEIGHT // ROW_TILE // geometry.parts, 1, 1, 1, 1)

    @classmethod
    def _filled(cls, geometry: Geometry, columns: int, folds: int, splits: int) -> "Schedule":
        """Returns the schedule of these cuts with as many slots as shared memory holds."""
        empty = cls(columns, folds, 1, 0, splits, 1)
        tiles = empty.tiles(geometry)
        resident = ceil(tiles * splits / NUM_MULTIPROCESSORS)
        blocks = tiles
        if resident > _MOST_RESIDENT:
            # Each block works on several tiles.
            resident = 2 if geometry.rows <= _FEW_ROWS else 1
            blocks = ceil(tiles / ceil(tiles * splits / (resident * NUM_MULTIPROCESSORS)))
        room = SHARED_BYTES // resident - _RESERVED_BYTES
        room = min(room, SHARED_BYTES_PER_BLOCK) - empty.shared_bytes(geometry)
        deep = folds == 1 and room >= 2 * _LEAST_STAGES * empty.slot_bytes(geometry)
        deep = deep and not geometry.inner % (2 * geometry.piece * splits)
        depth = 2 if deep else 1
        slots = room // (depth * empty.slot_bytes(geometry))
        steps = empty.turns_per_tile(geometry) * ceil(tiles / blocks) // depth
        return cls(columns, folds, depth, max(1, min(slots, steps)), splits, blocks)

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run under this schedule, or `None` if it can."""
        if min(self.columns, self.folds, self.depth, self.stages, self.splits, self.blocks) < 1:
            return f"all of a schedule must be at least 1, got {self}"
        height, width = self.height(geometry), self.width(geometry)
        if self.columns % ROW_TILE or self.columns & (self.columns - 1):
            return f"columns must be a power of two from {ROW_TILE} on, got {self.columns}"
        if self.columns > geometry.out:
            return f"a tile of {self.columns} columns is wider than the result, {geometry.out}"
        if height % HEIGHT:
            return f"a turn must hold a multiple of {HEIGHT} rows of the weight, got {height}"
        if width > _MOST_WIDTH or height * width > _MOST_SUMS:
            return f"{height} x {width} sums do not fit a warpgroup's registers"
        chunk = self.chunk(geometry)
        if geometry.inner % (chunk * self.folds * self.splits):
            return f"{geometry.inner} numbers cannot be cut into {self.splits} x {self.folds} x {chunk}"
        if self.shared_bytes(geometry) > SHARED_BYTES_PER_BLOCK:
            return f"it needs {self.shared_bytes(geometry)} bytes of shared memory"
        return None

    def height(self, geometry: Geometry) -> int:
        """Returns how many rows of the weight a slot holds."""
        return self.folds * geometry.parts * self.columns

    def chunk(self, geometry: Geometry) -> int:
        """Returns the numbers along the contraction in one chunk."""
        return geometry.piece * self.depth

    def width(self, geometry: Geometry) -> int:
        """Returns how many rows of x a slot holds: all of them, for each fold its own chunk."""
        return self.folds * geometry.padded_rows

    def tiles(self, geometry: Geometry) -> int:
        """Returns how many tiles the result has; the last one begins early, so that it is whole."""
        return ceil(geometry.out / self.columns)

    def turns_per_tile(self, geometry: Geometry) -> int:
        """Returns how many chunks a block takes for each tile and fold."""
        return geometry.inner // (self.chunk(geometry) * self.folds * self.splits)

    def tiles_per_block(self, geometry: Geometry) -> int:
        """Returns how many tiles each block works on; the last block repeats the last tile instead of having fewer."""
        return ceil(self.tiles(geometry) / self.blocks)

    def grid(self, geometry: Geometry) -> int:
        """Returns the blocks of each split."""
        return ceil(self.tiles(geometry) / self.tiles_per_block(geometry))

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one slot."""
        weights = self.height(geometry) * PIECE_BYTES * self.depth
        return weights + 2 * self.width(geometry) * self.chunk(geometry)

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory that one block asks for."""
        sums = 4 * self.height(geometry) * (self.width(geometry) + PADDING)
        sums = ceil(sums / ALIGNMENT) * ALIGNMENT
        return self.stages * self.slot_bytes(geometry) + sums + OTHER_BYTES

    def resident(self, geometry: Geometry) -> int:
        """Returns how many blocks a multiprocessor works on at once, as far as shared memory goes."""
        return SHARED_BYTES // (self.shared_bytes(geometry) + _RESERVED_BYTES)


def shape_class(geometry: Geometry) -> str:
    """Returns the name of the shapes that share a tuned schedule."""
    gated = " gated" if geometry.gated else ""
    return f"rows {geometry.padded_rows} {geometry.inner} -> {geometry.out}{gated} {jnp.dtype(geometry.stored).name}"


def _cuts(geometry: Geometry) -> list[tuple[int, int, int]]:
    """Returns columns, folds and splits to choose from, best first."""
    few = geometry.rows <= _FEW_ROWS
    widths = [width for width in (64, 32, 16, 8) if width <= geometry.out]
    stacked = [(width, max(1, HEIGHT // (width * geometry.parts)), 1) for width in widths]
    split = [
        (widths[0], max(1, HEIGHT // (widths[0] * geometry.parts)), count) for count in (2, 4, 8)
    ]
    cuts = stacked if few else [*stacked[:2], *split]
    large = geometry.weight_bytes > _LARGE_BYTES and geometry.padded_rows == ROW_TILE
    wanted = _ENOUGH_BLOCKS[2 if not few else 0 if large else 1]
    blocks = {cut: ceil(geometry.out / cut[0]) * cut[2] for cut in cuts}
    enough = [cut for cut in cuts if blocks[cut] >= wanted]
    rest = sorted((cut for cut in cuts if cut not in enough), key=lambda cut: -blocks[cut])
    return [*enough, *rest]
