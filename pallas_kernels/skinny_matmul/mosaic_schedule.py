"""Schedule of the `skinny_matmul` kernel: how it divides the weight among blocks and pipeline stages; host code.

Terms: a *tile* is the output columns that a block computes at once. A *turn* is one iteration over the contraction, and
a *chunk* its elements along the contraction. A *slot* is a pipeline stage in shared memory, which holds one turn.
"""

from dataclasses import astuple, dataclass, replace
from math import ceil, gcd
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
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.mosaic.few_bits_by_warp import HEIGHT, fits
from pallas_kernels.skinny_matmul.mosaic_geometry import MOST_ROWS, Geometry
from pallas_kernels.tuning import choose

# Most columns (N) of one wgmma.
_MOST_WIDTH = 256
# Most accumulator elements of a warpgroup: 128 registers per thread.
_MOST_SUMS = 16384
# With a weight in few bits, whose left operands and unscaled sums also take registers.
_MOST_WIDTH_OF_FEW_BITS, _MOST_SUMS_OF_FEW_BITS = 64, 8192
# Padding elements after each row of sums in shared memory, against bank conflicts along a column.
PADDING = 2
# Shared memory of mbarriers, and of Mosaic's own scratch.
OTHER_BYTES = 2048 + 512
# Most blocks per cluster; four and eight were slower.
MAX_CLUSTER = 2
# Most resident blocks per SM; with more, each block processes several tiles instead.
_MOST_RESIDENT = 3
# Most rows for which folded chunks cost negligible tensor-core time.
_FEW_ROWS = 16
# Most rows for which x and the sums take too little memory and traffic for clusters and passes to pay.
_SOME_ROWS = 32
# Least contraction for which avoiding folds of x saves more time than a cluster's exchange costs.
_LONG = 8192
# Number of folds at which eight rows of x have half as many bytes as the weight.
_CHEAP_FOLDS = 4
# Wanted number of blocks: for up to 8 rows of a large weight and for few rows of one in few bits, otherwise for few
# rows, and for many rows.
_ENOUGH_BLOCKS = (200, 128, 96)
# In the fixed order, where 64 rows have the tiles of one: narrower tiles read more of x than more blocks gain.
_ENOUGH_BLOCKS_IN_ORDER = 80
_LARGE_BYTES = 24 * 2**20
# Most columns, times the bits of a code, of a gated tile of up to 8 rows whose warps multiply on their own.
_GATED_BITS = 128
# Most stages: barriers of one group.
_MOST_STAGES = 32
# Least stages with which chunks of two pieces, which take fewer copies, are faster.
_LEAST_STAGES = 3


@dataclass(frozen=True)
class Schedule:
    """The division of the weight into tiles, folds and shares of blocks.

    It depends on static shapes only, so a row's result does not depend on the other rows.

    Attributes:
        columns: columns of the result per tile.
        folds: number of chunks that are stacked in one turn, so that few columns fill the 64 rows of a product; their
            sums are added at the end.
        depth: pieces (of 128 bytes, if they divide it) of a row of the weight per chunk.
        stages: pipeline stages (slots), the turns in flight.
        splits: split-K parts of a tile's contraction that XLA adds up.
        blocks: most blocks per split; with fewer blocks than tiles each processes several.
        cluster: blocks that divide a tile's contraction and add up their sums in distributed shared memory.
        passes: number of groups of rows whose sums go through shared memory one after the other.
        by_warp: whether each warp multiplies 16 rows of a weight in few bits with the rows of x of their fold
            (`mma.sync`), instead of a warpgroup all folds with all rows of x (wgmma).
    """

    columns: int
    folds: int
    depth: int
    stages: int
    splits: int
    blocks: int
    cluster: int = 1
    passes: int = 1
    by_warp: bool = False

    @classmethod
    def of(cls, geometry: Geometry) -> "Schedule":
        """Returns the tuned schedule for these shapes on this device, or else that of `by_rule`.

        Under the fixed order of sums it is that of `in_fixed_order`.
        """
        if is_fixed():
            return cls.in_fixed_order(geometry)
        return choose(
            "skinny_matmul",
            shape_class(geometry),
            Schedule,
            is_possible=lambda schedule: schedule.refusal(geometry) is None,
            by_rule=lambda: Schedule.by_rule(geometry),
        )

    @classmethod
    def by_rule(cls, geometry: Geometry) -> "Schedule":
        """Returns a schedule by rules fitted to measurements on an H200 (NOTES.md).

        All blocks run at once, with as many bytes in flight as shared memory allows. Tiles that are narrow for that
        reason are folded; splits, which take another launch, come last.
        """
        cuts = [*_cuts_of_many_rows(geometry), *_cuts(geometry)]
        packing = geometry.packing
        if packing is not None and geometry.rows <= _FEW_ROWS and fits(packing, geometry.piece):
            cuts = [*_cuts(geometry, by_warp=True), *cuts]
        found = [cls._filled(geometry, cut) for cut in cuts]
        able = [schedule for schedule in found if schedule.refusal(geometry) is None]
        return (
            able[0] if able else cls(ROW_TILE, WGMMA_ROWS // ROW_TILE // geometry.parts, 1, 1, 1, 1)
        )

    @classmethod
    def in_fixed_order(cls, geometry: Geometry) -> "Schedule":
        """Returns a schedule whose columns and folds, and with them the order of all sums, depend on the weight alone.

        The number of rows determines only how many stages and pieces per chunk there are, and how tiles are divided
        among blocks. Without folds every sum is one accumulator over the contraction in order, which chunks and tiles
        of any size can have; weights in few bits, whose kernel needs 64 rows of a stage, are folded by single pieces.
        """
        most = replace(geometry, rows=MOST_ROWS)
        if geometry.packing is None:
            widths, wanted = (64, 32, 16), _ENOUGH_BLOCKS_IN_ORDER
            cuts = [_Cut(width) for width in widths]
        else:
            widths, wanted = (64, 32, 16, 8), _ENOUGH_BLOCKS[2]
            cuts = [_Cut(width, max(1, WGMMA_ROWS // (width * geometry.parts))) for width in widths]
        cuts = [cut for cut in cuts if cls._filled(most, cut).refusal(most) is None]
        blocks = {cut: ceil(geometry.out / cut.columns) for cut in cuts}
        enough = [cut for cut in cuts if blocks[cut] >= wanted]
        return cls._filled(geometry, enough[0] if enough else max(cuts, key=blocks.__getitem__))

    @classmethod
    def _filled(cls, geometry: Geometry, cut: "_Cut") -> "Schedule":
        """Returns the schedule of a cut with as many stages as shared memory holds."""
        empty = cls(
            cut.columns, cut.folds, 1, 0, cut.splits, 1, cut.cluster, cut.passes, cut.by_warp
        )
        tiles = empty.tiles(geometry)
        resident = ceil(tiles * empty.shares / NUM_MULTIPROCESSORS)
        blocks = tiles
        if resident > (_MOST_RESIDENT if cut.passes == 1 else 1):
            # Each block processes several tiles.
            resident = 2 if geometry.rows <= _FEW_ROWS else 1
            blocks = ceil(tiles / ceil(tiles * empty.shares / (resident * NUM_MULTIPROCESSORS)))
        room = _room(geometry, empty, resident)
        while (
            geometry.packing is not None and resident > 1 and room < 2 * empty.slot_bytes(geometry)
        ):
            # Rows of x take more memory than codes, and a block with one stage could not refill it.
            resident -= 1
            blocks = ceil(tiles / ceil(tiles * empty.shares / (resident * NUM_MULTIPROCESSORS)))
            room = _room(geometry, empty, resident)
        found = empty._deepened(geometry, resident)
        slots = _room(geometry, found, resident) // found.slot_bytes(geometry)
        steps = found.turns_per_tile(geometry) * ceil(tiles / blocks)
        stages = max(1, min(slots, steps, _MOST_STAGES))
        return replace(found, stages=stages, blocks=blocks)

    def _deepened(self, geometry: Geometry, resident: int) -> "Schedule":
        """Returns a schedule without stages whose chunks have the most pieces with which there are enough stages.

        64 rows or more of the weight have chunks of up to two pieces, fewer rows as many as give a turn 64 rows' bytes.
        By warp a turn has the bytes of 128 rows of one piece, which two stages are enough for.
        """
        height, least = self.height(geometry), _LEAST_STAGES
        most = max(2, WGMMA_ROWS // height) if self.folds == 1 else 1
        if self.by_warp:
            most, least = max(1, 2 * WGMMA_ROWS // height), 2
        depth = gcd(most, geometry.inner // (geometry.piece * self.folds * self.shares))
        while True:
            found = replace(self, depth=depth)
            enough = least * found.slot_bytes(geometry)
            if depth <= 1 or _room(geometry, found, resident) >= enough:
                return found
            depth //= 2

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run under this schedule, or `None` if it can."""
        if min(astuple(replace(self, by_warp=True))) < 1:
            return f"all fields of a schedule must be at least 1, got {self}"
        height, width = self.product_rows(geometry), self.width(geometry)
        if self.columns % ROW_TILE or self.columns & (self.columns - 1):
            return f"columns must be a power of two and at least {ROW_TILE}, got {self.columns}"
        if self.columns > geometry.out:
            return f"a tile of {self.columns} columns is wider than the result, {geometry.out}"
        is_narrow = self.height(geometry) < WGMMA_ROWS
        if height % WGMMA_ROWS or (is_narrow and (self.folds > 1 or geometry.packing is not None)):
            return (
                f"a turn must hold a multiple of {WGMMA_ROWS} rows of the weight, or fewer of 16 bits without folds, "
                f"got {self.height(geometry)}"
            )
        widest, most = _MOST_WIDTH, _MOST_SUMS
        if geometry.packing is not None:
            widest, most = _MOST_WIDTH_OF_FEW_BITS, _MOST_SUMS_OF_FEW_BITS
        if self.by_warp:
            width = geometry.padded_rows
        if width > widest or height * width > most:
            return f"{height} x {width} sums do not fit in a warpgroup's registers"
        chunk = self.chunk(geometry)
        if geometry.inner % (chunk * self.folds * self.shares):
            return f"a contraction of {geometry.inner} is not a multiple of {self.shares} x {self.folds} x {chunk}"
        turns = self.turns_per_tile(geometry) * self.tiles_per_block(geometry)
        if self.stages == 1 and turns > 1:
            return f"a stage is refilled while the next one is read, so {turns} turns need two slots, got one"
        if self.shared_bytes(geometry) > SHARED_BYTES_PER_BLOCK:
            return f"it needs {self.shared_bytes(geometry)} bytes of shared memory"
        return self._refusal_of_windows(geometry) or self._refusal_by_warp(geometry)

    def _refusal_of_windows(self, geometry: Geometry) -> str | None:
        """Returns why the schedule's clusters or passes are not supported, or `None` if they are."""
        if self.cluster > MAX_CLUSTER or min(self.cluster, max(self.passes, self.splits)) > 1:
            return f"a cluster has at most {MAX_CLUSTER} blocks, one pass and no splits, got {self}"
        if max(self.cluster, self.passes) > 1 and self.folds > 1:
            return f"clusters and passes support no folds, got {self}"
        if self.cluster > 1 and self.height(geometry) < WGMMA_ROWS:
            return f"a cluster computes at least {WGMMA_ROWS} rows of the weight, got {self}"
        if self.cluster > 1 and geometry.packing is not None and self.height(geometry) > WGMMA_ROWS:
            return (
                f"with a weight in few bits a cluster computes {WGMMA_ROWS} rows of it, got {self}"
            )
        if self.cluster > 1 and (self.tiles_per_block(geometry) > 1 or geometry.rows <= ROW_TILE):
            return f"a cluster needs one tile per block and more than {ROW_TILE} rows, got {self}"
        return None

    def _refusal_by_warp(self, geometry: Geometry) -> str | None:
        """Returns why each warp cannot multiply on its own as the schedule asks, or `None` if it can."""
        if not self.by_warp:
            return None
        packing, chunk = geometry.packing, self.chunk(geometry)
        if packing is None:
            return f"only a weight in few bits is multiplied by warp, got {self}"
        if geometry.parts * self.columns % HEIGHT:
            return f"a warp multiplies {HEIGHT} rows of one fold, got {self}"
        if not fits(packing, chunk):
            return f"by warp a turn of {chunk} columns does not fit groups of {packing.group}"
        return None

    @property
    def shares(self) -> int:
        """Blocks among which a tile's contraction is divided, by clusters and splits."""
        return self.splits * self.cluster

    def window(self, geometry: Geometry) -> int:
        """Returns the rows of x whose sums are in shared memory at once."""
        groups = geometry.padded_rows // ROW_TILE
        return ROW_TILE * ceil(groups / max(self.cluster, self.passes))

    def sums_width(self, geometry: Geometry) -> int:
        """Returns the columns of the sums in shared memory: wgmma multiplies all folds with all rows of x."""
        return (1 if self.by_warp else self.folds) * self.window(geometry)

    def height(self, geometry: Geometry) -> int:
        """Returns the rows of the weight in a stage."""
        return self.folds * geometry.parts * self.columns

    def product_rows(self, geometry: Geometry) -> int:
        """Returns the rows of the left operand: with fewer rows of the weight the rest is what lies behind a stage."""
        return max(WGMMA_ROWS, self.height(geometry))

    def chunk(self, geometry: Geometry) -> int:
        """Returns the elements along the contraction in one chunk."""
        return geometry.piece * self.depth

    def width(self, geometry: Geometry) -> int:
        """Returns the rows of x in a stage: all of them once per fold."""
        return self.folds * geometry.padded_rows

    def tiles(self, geometry: Geometry) -> int:
        """Returns the number of tiles; the last one is shifted left so that it is whole."""
        return ceil(geometry.out / self.columns)

    def turns_per_tile(self, geometry: Geometry) -> int:
        """Returns the number of turns per tile."""
        return geometry.inner // (self.chunk(geometry) * self.folds * self.shares)

    def tiles_per_block(self, geometry: Geometry) -> int:
        """Returns the number of tiles per block; the last block repeats the last tile if there are fewer."""
        return ceil(self.tiles(geometry) / self.blocks)

    def grid(self, geometry: Geometry) -> int:
        """Returns the number of blocks per share."""
        return ceil(self.tiles(geometry) / self.tiles_per_block(geometry))

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one stage."""
        weights = self.height(geometry) * geometry.piece_bytes * self.depth
        return weights + 2 * self.width(geometry) * self.chunk(geometry)

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory of one block in bytes."""
        height, window = self.product_rows(geometry), self.window(geometry)
        sums = (
            ceil(4 * height * (self.sums_width(geometry) + PADDING) / SHARED_ALIGNMENT)
            * SHARED_ALIGNMENT
        )
        slots = self.stages * self.slot_bytes(geometry)
        # Behind the last stage's rows of the weight.
        slots += (height - self.height(geometry)) * geometry.piece_bytes * self.depth
        received = 4 * self.cluster * height * window if self.cluster > 1 else 0
        return slots + received + sums + OTHER_BYTES


def shape_class(geometry: Geometry) -> str:
    """Returns the shape class, the key of tuned schedules."""
    gated = " gated" if geometry.gated else ""
    packing = geometry.packing
    form = jnp.dtype(geometry.dtype).name if packing is None else f"{packing.code} {packing.group}"
    return f"rows {geometry.padded_rows} {geometry.inner} -> {geometry.out}{gated} {form}"


def _room(geometry: Geometry, empty: Schedule, resident: int) -> int:
    """Returns the bytes for stages in each of some resident blocks of an SM, given the schedule without stages."""
    room = SHARED_BYTES // resident - RESERVED_BYTES_PER_BLOCK
    return min(room, SHARED_BYTES_PER_BLOCK) - empty.shared_bytes(geometry)


class _Cut(NamedTuple):
    """The fields of a `Schedule` that the rules choose; the others follow from them."""

    columns: int
    folds: int = 1
    splits: int = 1
    cluster: int = 1
    passes: int = 1
    by_warp: bool = False


def _cuts_of_many_rows(geometry: Geometry) -> list[_Cut]:
    """Returns the preferred cut for 33 rows or more, if clusters or passes apply; else an empty list."""
    if geometry.rows <= _SOME_ROWS or geometry.packing is not None:
        return []
    tiles = ceil(geometry.out / WGMMA_ROWS)
    if geometry.gated:
        blocks = ceil(tiles / ceil(tiles / NUM_MULTIPROCESSORS))
        cut = _Cut(WGMMA_ROWS, passes=geometry.padded_rows // ROW_TILE)
    else:
        blocks = MAX_CLUSTER * tiles if geometry.inner >= _LONG else 0
        cut = _Cut(WGMMA_ROWS, cluster=MAX_CLUSTER)
    return [cut] if _ENOUGH_BLOCKS[2] <= blocks <= NUM_MULTIPROCESSORS else []


def _cuts(geometry: Geometry, *, by_warp: bool = False) -> list[_Cut]:
    """Returns the general cuts, best first, or those of few rows whose warps multiply on their own if they can."""
    few = geometry.rows <= _FEW_ROWS
    widest = min(geometry.out, WGMMA_ROWS)
    if by_warp and geometry.gated and geometry.padded_rows == ROW_TILE:
        widest = min(widest, _GATED_BITS // geometry.bits)
    widths = [width for width in (64, 32, 16, 8) if width <= widest]
    stacked = [_Cut(width, max(1, WGMMA_ROWS // (width * geometry.parts))) for width in widths]
    if by_warp:
        # All but the narrowest.
        stacked = [cut._replace(by_warp=cut.columns * geometry.parts >= HEIGHT) for cut in stacked]
    paired = [_Cut(WGMMA_ROWS, cluster=MAX_CLUSTER)] if geometry.packing is not None else []
    split = [stacked[0]._replace(splits=count) for count in (2, 4, 8)]
    cuts = stacked if few else [*stacked[:2], *paired, *split]
    large = geometry.weight_bytes > _LARGE_BYTES and geometry.padded_rows == ROW_TILE
    # One block per SM has too few warps to widen codes as fast as they arrive.
    wanted = _ENOUGH_BLOCKS[2 if not few else 0 if large or by_warp else 1]
    blocks = {cut: ceil(geometry.out / cut.columns) * cut.splits * cut.cluster for cut in cuts}
    # Eight folds fetch as much of x as of the weight, which costs more than additional blocks gain.
    cheap = {_CHEAP_FOLDS}
    if by_warp and geometry.bits == 4 and geometry.padded_rows > ROW_TILE:
        # Four folds of 16 rows would fetch four times the bytes of the codes.
        cheap.add(_CHEAP_FOLDS // 2)
    least = {cut: _ENOUGH_BLOCKS[1] if cut.folds in cheap else wanted for cut in cuts}
    enough = [cut for cut in cuts if blocks[cut] >= min(wanted, least[cut])]
    rest = sorted((cut for cut in cuts if cut not in enough), key=lambda cut: -blocks[cut])
    return [*enough, *rest]
