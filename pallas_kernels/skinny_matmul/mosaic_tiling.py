"""Tiling of a product with many rows by the kernel of mosaic_many_rows.py; host code.

Terms: a *tile* is some columns of the result x some rows of x, which a cluster of one or two blocks computes over the
whole contraction. A *turn* is one iteration over the contraction, and a *slot* a pipeline stage in shared memory, which
holds one turn.
"""

from dataclasses import dataclass, replace
from math import ceil

from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    SHARED_ALIGNMENT,
    SHARED_BYTES_PER_BLOCK,
    WGMMA_ROWS,
)
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import OTHER_BYTES, PADDING

# Bytes of a row of x in the widest swizzle, the chunk of a turn.
_CHUNK = 128
# Rows of x whose sums are in shared memory at once.
WINDOW = 32
# Most blocks of a cluster, consumer warpgroups, and columns (N) of one wgmma, whose sums take 128 registers per thread.
_MOST_CLUSTER, _MOST_CONSUMERS, _MOST_ROWS = 2, 2, 256
_MOST_ROWS_OF_168, _MOST_WIDENED_OF_168 = 224, 160
# Most stages; more do not increase the bandwidth.
_MOST_STAGES = 10
# Windows of the residual that are in shared memory at once: all of a tile of up to four, and two of a larger one.
_ALL_WINDOWS, _SOME_WINDOWS = 4, 2
# Bytes of x times rows of the weight that an SM's tensor cores multiply per clock: 2048 products of 16 bits.
_PRODUCTS = 4096
# Clocks of a turn whose codes are widened in registers: of any block, per consumer, and per row of x. They fit 30 timed
# products of fp8 and int4 within 16%; a consumer's product and its widening follow one another.
_WIDEN, _WIDEN_CONSUMER, _WIDEN_ROW = 240, 160, 2.7
# Bytes per clock from L2 that one SM reads at most, and that all SMs read together in a launch of several waves.
_BYTES_OF_ONE, _BYTES_OF_ALL = 64, 5400
# Clocks per turn for which the blocks of a cluster wait for one another.
_CLUSTER_CLOCKS = 60
# Rows of x whose tiles are adjacent, so that these rows stay in L2 while the weight is read once.
_BAND = 2048


@dataclass(frozen=True)
class Tiling:
    """The division of a product into tiles.

    It changes no bit of the result: every sum is one accumulator over the contraction in order.

    Attributes:
        rows: rows of x per tile, N of the products.
        consumers: warpgroups of a block that multiply; each has 64 rows of the weight.
        stages: pipeline stages (slots).
        cluster: blocks that have the same rows and adjacent columns; each reads a part of the rows from L2 for all.
        blocks: most persistent blocks; cluster c of n computes the tiles c, c + n, ...
    """

    rows: int
    consumers: int
    stages: int
    cluster: int = 1
    blocks: int = NUM_MULTIPROCESSORS

    @classmethod
    def by_rule(cls, geometry: Geometry, rows: int) -> "Tiling":
        """Returns the tiling of `rows` rows that an estimate of tensor-core and L2 time prefers."""
        most = _MOST_ROWS
        if not honours_register_requests():
            # More rows would spill registers where consumers have no more than the producer (168).
            most = _MOST_WIDENED_OF_168 if _widens(geometry) else _MOST_ROWS_OF_168
        counts = range(ceil(rows / most), ceil(rows / WGMMA_ROWS) + 1)
        sizes = sorted({ceil(rows / (count * WINDOW)) * WINDOW for count in counts}, reverse=True)
        found = [
            cls._of_size(geometry, size, consumers, cluster)
            for cluster in range(1, _MOST_CLUSTER + 1)
            for consumers in range(1, _MOST_CONSUMERS + 1)
            for size in sizes
        ]
        able = [tiling for tiling in found if tiling.refusal(geometry) is None]
        return min(able, key=lambda tiling: tiling.clocks(geometry, rows))

    @classmethod
    def _of_size(cls, geometry: Geometry, rows: int, consumers: int, cluster: int) -> "Tiling":
        """Returns a tiling with as many stages as shared memory holds."""
        empty = cls(rows, consumers, 0, cluster)
        room = SHARED_BYTES_PER_BLOCK - empty.shared_bytes(geometry)
        slots = room // empty.slot_bytes(geometry)
        return replace(empty, stages=min(slots, _MOST_STAGES))

    def refusal(self, geometry: Geometry) -> str | None:
        """Returns why the kernel cannot run with this tiling, or `None` if it can."""
        if self.rows % WINDOW or not 0 < self.rows <= _MOST_ROWS:
            return (
                f"a tile must have a multiple of {WINDOW} rows up to {_MOST_ROWS}, got {self.rows}"
            )
        if not 0 < self.consumers <= _MOST_CONSUMERS:
            return f"a block has 1 to {_MOST_CONSUMERS} consumers, got {self.consumers}"
        if not 0 < self.cluster <= _MOST_CLUSTER:
            return f"a cluster has 1 to {_MOST_CLUSTER} blocks, got {self.cluster}"
        if self.columns(geometry) > geometry.out:
            return f"a tile of {self.columns(geometry)} columns is wider than the result, {geometry.out}"
        if self.stages < 2 or self.blocks < self.cluster:
            return f"a tiling needs at least two stages and one cluster, got {self}"
        if self.shared_bytes(geometry) > SHARED_BYTES_PER_BLOCK:
            return f"it needs {self.shared_bytes(geometry)} bytes of shared memory"
        return None

    @property
    def residual_windows(self) -> int:
        """Windows of the residual that are in shared memory at once."""
        windows = self.rows // WINDOW
        return windows if windows <= _ALL_WINDOWS else _SOME_WINDOWS

    @property
    def height(self) -> int:
        """Rows of the weight in a stage."""
        return self.consumers * WGMMA_ROWS

    def own_columns(self, geometry: Geometry) -> int:
        """Returns the columns of the result that one consumer computes, from as many rows of gates and of others."""
        return WGMMA_ROWS // geometry.parts

    def block_columns(self, geometry: Geometry) -> int:
        """Returns the columns of the result that one block computes."""
        return self.consumers * self.own_columns(geometry)

    def columns(self, geometry: Geometry) -> int:
        """Returns the columns of the result per tile."""
        return self.cluster * self.block_columns(geometry)

    def column_tiles(self, geometry: Geometry) -> int:
        """Returns the tiles that cover the columns; the last one is shifted left so that it is whole."""
        return ceil(geometry.out / self.columns(geometry))

    def row_tiles(self, rows: int) -> int:
        """Returns the tiles that cover the rows of x."""
        return ceil(rows / self.rows)

    def tiles(self, geometry: Geometry, rows: int) -> int:
        """Returns the number of tiles."""
        return self.column_tiles(geometry) * self.row_tiles(rows)

    def band(self, rows: int) -> int:
        """Returns the row tiles whose tiles are adjacent for the same columns."""
        return min(self.row_tiles(rows), max(1, _BAND // self.rows))

    def grid(self, geometry: Geometry, rows: int) -> int:
        """Returns the number of clusters of the launch."""
        return min(self.blocks // self.cluster, self.tiles(geometry, rows))

    def clocks(self, geometry: Geometry, rows: int) -> float:
        """Returns the estimated clocks per turn of all waves: those of the multiplication or of L2, whichever are more.

        A stage arrives at one SM no faster than `_BYTES_OF_ONE`. In a launch of several waves all SMs share the rate of
        L2, from which a cluster reads the rows of x once; in a single wave 128 SMs were seen to read at their own rate.
        """
        grid = self.grid(geometry, rows)
        waves = ceil(self.tiles(geometry, rows) / grid)
        multiply = self.height * self.rows * _CHUNK / _PRODUCTS
        if _widens(geometry):
            widen = _WIDEN + _WIDEN_CONSUMER * self.consumers + _WIDEN_ROW * self.rows
            multiply = max(multiply, widen)
        arrive = self.slot_bytes(geometry) / _BYTES_OF_ONE
        weight, x = self.weight_bytes(geometry), _CHUNK * self.rows
        read = (self.cluster * weight + x) * grid / _BYTES_OF_ALL if waves > 1 else 0.0
        return waves * (max(multiply, arrive, read) + _CLUSTER_CLOCKS * (self.cluster - 1))

    def weight_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of the weight in one stage."""
        return self.height * geometry.turn * geometry.bits // 8

    def slot_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes of one stage."""
        return self.weight_bytes(geometry) + _CHUNK * self.rows

    def shared_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory of one block in bytes."""
        sums = 4 * self.height * (WINDOW + PADDING)
        # Of 16 bits; a wider residual is not copied.
        residuals = 2 * self.residual_windows * WINDOW * self.block_columns(geometry)
        staged = sum(ceil(size / SHARED_ALIGNMENT) * SHARED_ALIGNMENT for size in (sums, residuals))
        return self.stages * self.slot_bytes(geometry) + staged + OTHER_BYTES


def _widens(geometry: Geometry) -> bool:
    """Returns whether codes are widened before they are multiplied."""
    return geometry.packing is not None and not geometry.rounds_rows
