"""How the Mosaic GPU kernel of `skinny_matmul` cuts weights into pieces. Traces nothing.

Words: a *tile* is as many output columns as a block computes at once, a *chunk* the numbers along the contraction
that it takes in one turn. What a turn fetches lies in a *slot* of shared memory.
"""

from dataclasses import astuple, dataclass, replace
from math import ceil
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    RESERVED_BYTES_PER_BLOCK,
    ROW_TILE,
    SHARED_ALIGNMENT,
    SHARED_BYTES,
    SHARED_BYTES_PER_BLOCK,
    WGMMA_ROWS,
)
from pallas_kernels.skinny_matmul.mosaic_geometry import PIECE_BYTES, Geometry
from pallas_kernels.tuning import choose

# Widest right operand of one wgmma.
_MOST_WIDTH = 256
# Sums that a warpgroup keeps in registers: 128 of each thread.
_MOST_SUMS = 16384
# Numbers after each row of sums in shared memory, so that a column of them lies in many banks.
PADDING = 2
# Barriers, and the scratch that Mosaic adds.
OTHER_BYTES = 2048 + 512
# Blocks of one cluster; four and eight were slower.
MAX_CLUSTER = 2
# Blocks that share a multiprocessor at most before each works on several tiles instead.
_MOST_RESIDENT = 3
# Rows up to which stacked chunks take the tensor cores no time to speak of.
_FEW_ROWS = 16
# Rows up to which those of x, and their sums, take too little room and traffic for clusters and passes.
_SOME_ROWS = 32
# Numbers along the contraction from which unfolded rows of x save more than a cluster's meeting takes.
_LONG = 8192
# Folds with which eight rows of x are half as much to fetch as the weight.
_CHEAP_FOLDS = 4
# Blocks that are enough: for up to 8 rows of a large weight, else for few rows, and for many rows.
_ENOUGH_BLOCKS = (200, 128, 96)
_LARGE_BYTES = 24 * 2**20
# Slots that a block should have at least before chunks of two pieces, which take fewer copies, are worth it.
_LEAST_STAGES = 3


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
        cluster: blocks that share a tile's contraction and add up their sums in shared memory, each for its own rows.
        passes: times that a tile's sums go through shared memory, each time those of so many rows fewer.
    """

    columns: int
    folds: int
    depth: int
    stages: int
    splits: int
    blocks: int
    cluster: int = 1
    passes: int = 1

    @classmethod
    def of(cls, geometry: Geometry) -> "Schedule":
        """Takes what was measured to be fastest for such shapes on this device, or else what the rules say."""
        return choose(
            "skinny_matmul",
            shape_class(geometry),
            Schedule,
            is_possible=lambda schedule: schedule.refusal(geometry) is None,
            by_rule=lambda: Schedule.by_rule(geometry),
        )

    @classmethod
    def by_rule(cls, geometry: Geometry) -> "Schedule":
        """Chooses what was fastest on an H200 for shapes like these (NOTES.md).

        All blocks are at work at once and hold as much in flight as shared memory allows. Tiles narrow enough for that
        are stacked by folds; splits, which take another launch, come last.
        """
        cuts = [*_cuts_of_many_rows(geometry), *_cuts(geometry)]
        found = [cls._filled(geometry, cut) for cut in cuts]
        able = [schedule for schedule in found if schedule.refusal(geometry) is None]
        return (
            able[0] if able else cls(ROW_TILE, WGMMA_ROWS // ROW_TILE // geometry.parts, 1, 1, 1, 1)
        )

    @classmethod
    def _filled(cls, geometry: Geometry, cut: "_Cut") -> "Schedule":
        """Returns the schedule of these cuts with as many slots as shared memory holds."""
        empty = cls(cut.columns, cut.folds, 1, 0, cut.splits, 1, cut.cluster, cut.passes)
        tiles = empty.tiles(geometry)
        resident = ceil(tiles * empty.shares / NUM_MULTIPROCESSORS)
        blocks = tiles
        if resident > (_MOST_RESIDENT if cut.passes == 1 else 1):
            # Each block works on several tiles.
            resident = 2 if geometry.rows <= _FEW_ROWS else 1
            blocks = ceil(tiles / ceil(tiles * empty.shares / (resident * NUM_MULTIPROCESSORS)))
        room = SHARED_BYTES // resident - RESERVED_BYTES_PER_BLOCK
        room = min(room, SHARED_BYTES_PER_BLOCK) - empty.shared_bytes(geometry)
        deep = cut.folds == 1 and room >= 2 * _LEAST_STAGES * empty.slot_bytes(geometry)
        deep = deep and not geometry.inner % (2 * geometry.piece * empty.shares)
        depth = 2 if deep else 1
        slots = room // (depth * empty.slot_bytes(geometry))
        steps = empty.turns_per_tile(geometry) * ceil(tiles / blocks) // depth
        stages = max(1, min(slots, steps))
        return replace(empty, depth=depth, stages=stages, blocks=blocks)

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run under this schedule, or `None` if it can."""
        if min(astuple(self)) < 1:
            return f"all of a schedule must be at least 1, got {self}"
        height, width = self.height(geometry), self.width(geometry)
        if self.columns % ROW_TILE or self.columns & (self.columns - 1):
            return f"columns must be a power of two from {ROW_TILE} on, got {self.columns}"
        if self.columns > geometry.out:
            return f"a tile of {self.columns} columns is wider than the result, {geometry.out}"
        if height % WGMMA_ROWS:
            return f"a turn must hold a multiple of {WGMMA_ROWS} rows of the weight, got {height}"
        if width > _MOST_WIDTH or height * width > _MOST_SUMS:
            return f"{height} x {width} sums do not fit a warpgroup's registers"
        chunk = self.chunk(geometry)
        if geometry.inner % (chunk * self.folds * self.shares):
            return f"{geometry.inner} numbers cannot be cut into {self.shares} x {self.folds} x {chunk}"
        turns = self.turns_per_tile(geometry) * self.tiles_per_block(geometry)
        if self.stages == 1 and turns > 1 and not geometry.packed:
            return f"a slot is sent for again a turn after it was read, so {turns} turns need two slots"
        if self.shared_bytes(geometry) > SHARED_BYTES_PER_BLOCK:
            return f"it needs {self.shared_bytes(geometry)} bytes of shared memory"
        return self._refusal_of_windows(geometry)

    def _refusal_of_windows(self, geometry: Geometry) -> str | None:
        """Returns why sums cannot be joined by a cluster, or go through shared memory in several passes."""
        if self.cluster > MAX_CLUSTER or min(self.cluster, max(self.passes, self.splits)) > 1:
            return f"a cluster has at most {MAX_CLUSTER} blocks, one pass and no splits, got {self}"
        if max(self.cluster, self.passes) > 1 and (self.folds > 1 or geometry.packed):
            return f"clusters and passes take neither folds nor weights of 8 bits, got {self}"
        if self.cluster > 1 and (self.tiles_per_block(geometry) > 1 or geometry.rows <= ROW_TILE):
            return f"a cluster joins one tile of more than {ROW_TILE} rows, got {self}"
        return None

    @property
    def shares(self) -> int:
        """Blocks among which a tile's contraction is cut, whoever adds up what they found."""
        return self.splits * self.cluster

    def window(self, geometry: Geometry) -> int:
        """Returns of how many rows of x sums lie in shared memory at once."""
        groups = geometry.padded_rows // ROW_TILE
        return ROW_TILE * ceil(groups / max(self.cluster, self.passes))

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
        return geometry.inner // (self.chunk(geometry) * self.folds * self.shares)

    def tiles_per_block(self, geometry: Geometry) -> int:
        """Returns how many tiles each block works on; the last block repeats the last tile instead of having fewer."""
        return ceil(self.tiles(geometry) / self.blocks)

    def grid(self, geometry: Geometry) -> int:
        """Returns the blocks of each share."""
        return ceil(self.tiles(geometry) / self.tiles_per_block(geometry))

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one slot."""
        weights = self.height(geometry) * PIECE_BYTES * self.depth
        return weights + 2 * self.width(geometry) * self.chunk(geometry)

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory that one block asks for."""
        height, window = self.height(geometry), self.window(geometry)
        sums = (
            ceil(4 * height * (self.folds * window + PADDING) / SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        )
        slots = self.stages * self.slot_bytes(geometry)
        received = 4 * self.cluster * height * window if self.cluster > 1 else 0
        return slots + received + sums + OTHER_BYTES

    def resident(self, geometry: Geometry) -> int:
        """Returns how many blocks a multiprocessor works on at once, as far as shared memory goes."""
        return SHARED_BYTES // (self.shared_bytes(geometry) + RESERVED_BYTES_PER_BLOCK)


def shape_class(geometry: Geometry) -> str:
    """Returns the name of the shapes that share a tuned schedule."""
    gated = " gated" if geometry.gated else ""
    return f"rows {geometry.padded_rows} {geometry.inner} -> {geometry.out}{gated} {jnp.dtype(geometry.stored).name}"


class _Cut(NamedTuple):
    """What the rules choose from; the rest of a schedule follows. Words as there."""

    columns: int
    folds: int = 1
    splits: int = 1
    cluster: int = 1
    passes: int = 1


def _cuts_of_many_rows(geometry: Geometry) -> list[_Cut]:
    """Returns what is better than all other cuts for 33 rows or more, if anything is."""
    if geometry.rows <= _SOME_ROWS or geometry.packed:
        return []
    tiles = ceil(geometry.out / WGMMA_ROWS)
    if geometry.gated:
        blocks = ceil(tiles / ceil(tiles / NUM_MULTIPROCESSORS))
        cut = _Cut(WGMMA_ROWS, passes=geometry.padded_rows // ROW_TILE)
    else:
        blocks = MAX_CLUSTER * tiles if geometry.inner >= _LONG else 0
        cut = _Cut(WGMMA_ROWS, cluster=MAX_CLUSTER)
    return [cut] if _ENOUGH_BLOCKS[2] <= blocks <= NUM_MULTIPROCESSORS else []


def _cuts(geometry: Geometry) -> list[_Cut]:
    """Returns the cuts that any shape may have, best first."""
    few = geometry.rows <= _FEW_ROWS
    widths = [width for width in (64, 32, 16, 8) if width <= geometry.out]
    stacked = [_Cut(width, max(1, WGMMA_ROWS // (width * geometry.parts))) for width in widths]
    split = [stacked[0]._replace(splits=count) for count in (2, 4, 8)]
    cuts = stacked if few else [*stacked[:2], *split]
    large = geometry.weight_bytes > _LARGE_BYTES and geometry.padded_rows == ROW_TILE
    wanted = _ENOUGH_BLOCKS[2 if not few else 0 if large else 1]
    blocks = {cut: ceil(geometry.out / cut.columns) * cut.splits for cut in cuts}
    # Eight folds fetch as much of x as of the weight; for more blocks that is no bargain.
    least = {cut: _ENOUGH_BLOCKS[1] if cut.folds == _CHEAP_FOLDS else wanted for cut in cuts}
    enough = [cut for cut in cuts if blocks[cut] >= min(wanted, least[cut])]
    rest = sorted((cut for cut in cuts if cut not in enough), key=lambda cut: -blocks[cut])
    return [*enough, *rest]
