"""Geometry (sizes, limits) and schedule (clusters, split-K parts, stages) of `paged_attention`'s kernel; host code."""

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
)
from pallas_kernels.tuning import choose, round_up_to_power

# Keys per tile: M of one wgmma.
TILE = 64
# Larger clusters are non-portable in CUDA, and took twice as long to start.
MAX_CLUSTER = 8
# Most blocks with which clusters of four and more all start at once: half of the SMs.
_FEW_BLOCKS = 66
# Most elements of a block's accumulator: 32 registers per thread.
MAX_ACCUMULATOR = 4096
# Shared memory of Mosaic's reductions, and of mbarriers.
OTHER_BYTES = 2048 + 256
# Most resident blocks per SM: each thread has up to 128 registers.
_MOST_RESIDENT = 4
# Least tiles per share for which a second launch, which combines more shares, saves more time than it costs. An 8-bit
# tile takes longer, so its bound is lower.
_LONG_SHARE, _LONG_PACKED_SHARE = 48, 24


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_dim: components of a head.
        page_size: tokens per page.
        dtype: dtype of queries and output.
        stored: 8-bit dtype of keys and values with scales; `None` if they have `dtype`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike
    stored: DTypeLike | None = None

    @classmethod
    def of(cls, q: ArrayOrStruct, k_pages: ArrayOrStruct) -> "Geometry":
        """Returns the geometry of these queries and pages."""
        stored = None if k_pages.dtype == q.dtype else k_pages.dtype
        return cls(q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], q.dtype, stored)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"q must be bfloat16 or float16, got {self.dtype}"
        if self.head_dim not in (64, 128, 192, 256):
            return f"head_dim must be 64, 128, 192 or 256, got {self.head_dim}"
        if self.page_size % TILE and self.page_size not in (8, 16, 32):
            return f"page_size must be 8, 16, 32 or a multiple of {TILE}, got {self.page_size}"
        if self.filled_group > self._most_columns:
            return (
                f"at most {self._most_columns} query heads of {self.head_dim} can share a key head, "
                f"got {self.group}"
            )
        return None

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def filled_group(self) -> int:
        """Query heads per key head after padding by XLA; the group's own size if no padding is needed.

        A group that does not start at a multiple of 8 heads spans one more tile of 8. If the accumulator has no
        registers for that tile, XLA pads the groups to multiples of 8.
        """
        return self.group if self.columns <= self._most_columns else _whole_tiles(self.group)

    @property
    def _most_columns(self) -> int:
        return MAX_ACCUMULATOR // self.head_dim // ROW_TILE * ROW_TILE

    @property
    def columns(self) -> int:
        """Query heads fetched for one key head: the whole tiles of 8 that the group spans."""
        ends = [head * self.group % ROW_TILE + self.group for head in range(self.kv_heads)]
        return _whole_tiles(max(ends))

    @property
    def padded_heads(self) -> int:
        """Number of heads to which q is padded, so that every fetch is within bounds."""
        last = (self.kv_heads - 1) * self.group // ROW_TILE * ROW_TILE
        return max(last + self.columns, _whole_tiles(self.heads))

    @property
    def pages_dtype(self) -> DTypeLike:
        """Dtype of the pools."""
        return self.dtype if self.stored is None else self.stored

    @property
    def operand(self) -> DTypeLike:
        """Dtype of wgmma operands. 8-bit values become float16, since no instruction converts them to bfloat16."""
        return self.dtype if self.stored is None else jnp.float16

    @property
    def copies_per_tile(self) -> int:
        """Pages, and so TMA copies, per tile of keys."""
        return max(1, TILE // self.page_size)

    def shared_bytes(self, schedule: "Schedule") -> int:
        """Returns the shared memory of one block in bytes."""
        tile, queries = TILE * self.head_dim, self.columns * self.head_dim
        arrays = [tile * jnp.dtype(self.pages_dtype).itemsize * schedule.stages] * 2
        # Queries and output (or queries in both dtypes), and weights.
        arrays += [2 * queries, 2 * queries, 2 * self.columns * TILE]
        if self.stored is not None:
            arrays.append(2 * tile)
        if schedule.cluster > 1:
            arrays += [4 * queries * schedule.cluster, 4 * self.columns * TILE * schedule.cluster]
        return (
            sum(ceil(size / SHARED_ALIGNMENT) * SHARED_ALIGNMENT for size in arrays) + OTHER_BYTES
        )


@dataclass(frozen=True)
class Schedule:
    """The division of a row's keys among blocks: `cluster * parts` shares.

    It depends on static shapes only, so a row's result does not depend on the other rows.

    Attributes:
        cluster: blocks of a cluster, which combine their shares in shared memory.
        parts: clusters per row and key head, whose results XLA combines in a second launch.
        stages: pipeline stages: tiles of keys and of values in flight per block.
    """

    cluster: int
    parts: int
    stages: int

    @classmethod
    def of(cls, geometry: Geometry, rows: int, capacity: int, window: int | None) -> "Schedule":
        """Returns the tuned schedule for these shapes on this device, or else that of `by_rule`.

        Args:
            geometry: the sizes of heads and pages.
            rows: rows of the call.
            capacity: most keys of a row: page table columns * page size.
            window: sliding window in keys, or `None`.
        """
        return choose(
            "paged_attention",
            shape_class(geometry, rows, capacity, window),
            Schedule,
            is_possible=lambda schedule: schedule.is_possible(geometry, tiles_of(capacity, window)),
            by_rule=lambda: Schedule.by_rule(geometry, rows, capacity, window),
        )

    @classmethod
    def by_rule(
        cls, geometry: Geometry, rows: int, capacity: int, window: int | None
    ) -> "Schedule":
        """Returns a schedule by rules fitted to measurements on an H200 (NOTES.md); arguments as in `of`."""
        tiles, pairs = tiles_of(capacity, window), rows * geometry.kv_heads
        cluster, parts = _fastest_cluster(geometry, pairs, tiles), 1
        wide = geometry.stored is None
        # Blocks that convert 8-bit tiles are bound by latency rather than bandwidth, so all resident blocks are used.
        wanted = NUM_MULTIPROCESSORS * (1 if wide else _resident(geometry, cls(1, 1, 2)))
        long_share = _LONG_SHARE if wide else _LONG_PACKED_SHARE
        if 2 * pairs * cluster <= wanted and tiles >= long_share * cluster:
            cluster = min(cluster, 2 if wide else 1)
            parts = max(1, min(wanted // (pairs * cluster), tiles // (8 * cluster)))
        stages = _best_stages(geometry, cls(cluster, parts, 1), pairs, tiles)
        return cls(cluster, parts, stages)

    def is_possible(self, geometry: Geometry, tiles: int) -> bool:
        """Returns whether the schedule fits the hardware and leaves no share of a full row empty."""
        if min(self.cluster, self.parts, self.stages) < 1 or self.cluster > MAX_CLUSTER:
            return False
        shares = self.cluster * self.parts
        return (shares == 1 or shares <= tiles) and _fits(geometry, self)

    def without_clusters(self) -> "Schedule":
        """Returns the schedule with parts instead of clusters, for the interpreter.

        The interpreter has no stores into another block's shared memory.
        """
        return replace(self, cluster=1, parts=self.cluster * self.parts)


def shape_class(geometry: Geometry, rows: int, capacity: int, window: int | None) -> str:
    """Returns the shape class, the key of tuned schedules; rows and keys are rounded up to powers of two."""
    keys = round_up_to_power(tiles_of(capacity, window) * TILE)
    return (
        f"rows {round_up_to_power(rows)} keys {keys} heads {geometry.heads}/{geometry.kv_heads}x"
        f"{geometry.head_dim} page {min(geometry.page_size, TILE)} {jnp.dtype(geometry.pages_dtype).name}"
    )


def _whole_tiles(rows: int) -> int:
    """Rounds up to a multiple of 8."""
    return ceil(rows / ROW_TILE) * ROW_TILE


def tiles_of(capacity: int, window: int | None) -> int:
    """Returns the most tiles of keys that a row can see."""
    return ceil((capacity if window is None else min(capacity, window + TILE)) / TILE)


def _fastest_cluster(geometry: Geometry, pairs: int, tiles: int) -> int:
    """Returns the cluster size: the number of blocks that split a row's keys without a second launch.

    Clusters of four and more leave some SMs without a block, and a grid of them that fills the GPU runs in two waves.
    In a batch that fills the GPU with single blocks, long rows are split in two to shorten the tail.
    """
    cluster = 1
    while 2 * cluster <= min(MAX_CLUSTER, tiles):
        most_blocks = NUM_MULTIPROCESSORS if cluster == 1 else _FEW_BLOCKS
        if 2 * pairs * cluster > most_blocks or not _fits(geometry, Schedule(2 * cluster, 1, 2)):
            break
        cluster *= 2
    if cluster == 1:
        cut = 2 if tiles > 64 else 1
        cluster = cut if _fits(geometry, Schedule(cut, 1, 2)) else 1
    return cluster


def _best_stages(geometry: Geometry, shares: Schedule, pairs: int, tiles: int) -> int:
    """Returns the number of stages: three, or two if the last wave of blocks is then fuller.

    For 8-bit pages two are enough, since computing on a tile takes longer than fetching it.
    """
    blocks = pairs * shares.cluster * shares.parts
    most = min(3 if geometry.stored is None else 2, ceil(tiles / (shares.cluster * shares.parts)))
    found = [replace(shares, stages=stages) for stages in range(most, 1, -1)]
    found = [schedule for schedule in found if _fits(geometry, schedule)]
    if not found:
        return 1

    def busy(schedule: Schedule) -> float:
        waves = blocks / (NUM_MULTIPROCESSORS * _resident(geometry, schedule))
        return waves / ceil(waves)

    if blocks > NUM_MULTIPROCESSORS and busy(found[-1]) > busy(found[0]) + 0.1:
        return found[-1].stages
    return found[0].stages


def _resident(geometry: Geometry, schedule: Schedule) -> int:
    """Returns the number of resident blocks per SM."""
    per_block = geometry.shared_bytes(schedule) + RESERVED_BYTES_PER_BLOCK
    return max(1, min(_MOST_RESIDENT, SHARED_BYTES // per_block))


def _fits(geometry: Geometry, schedule: Schedule) -> bool:
    """Returns whether a block's shared memory is within the limit."""
    return geometry.shared_bytes(schedule) <= SHARED_BYTES_PER_BLOCK
