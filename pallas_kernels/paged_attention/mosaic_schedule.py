"""The sizes of the Mosaic GPU kernel of `paged_attention`, and how it shares out a row's keys. Traces nothing."""

from dataclasses import dataclass, replace
from math import ceil

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    RESERVED_BYTES_PER_BLOCK,
    SHARED_BYTES,
    SHARED_BYTES_PER_BLOCK,
)

# Keys that a block takes at once: the height of one wgmma.
TILE = 64
# Rows that a copy into swizzled shared memory starts at and counts in.
ROW_TILE = 8
# Larger clusters need the driver's leave, and took twice as long to start.
MAX_CLUSTER = 8
# Blocks at which clusters of four and more still start all at once.
_FEW_BLOCKS = 64
# Elements of the output that a block can keep in registers: 32 a thread, among all else that it keeps.
MAX_ACCUMULATOR = 4096
# Shared memory that no formula counts: barriers, the scratch of reductions, alignment.
_OTHER_BYTES = 4 * 1024


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike

    @classmethod
    def of(cls, q: Array, k_pages: Array) -> "Geometry":
        """Returns the sizes of these queries and pages."""
        return cls(q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1], q.dtype)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"q and the pages must be bfloat16 or float16, got {self.dtype}"
        if self.head_dim not in (64, 128, 192, 256):
            return f"head_dim must be 64, 128, 192 or 256, got {self.head_dim}"
        if self.page_size % TILE and self.page_size not in (8, 16, 32):
            return f"page_size must be 8, 16, 32 or a multiple of {TILE}, got {self.page_size}"
        most = MAX_ACCUMULATOR // self.head_dim
        if self.columns > most:
            return f"about {most} queries of {self.head_dim} can share a key head, got {self.group}"
        return None

    @property
    def group(self) -> int:
        """Queries that share a key head."""
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Queries fetched for one key head: whole tiles of 8 around the group, wherever it starts."""
        ends = [head * self.group % ROW_TILE + self.group for head in range(self.kv_heads)]
        return ceil(max(ends) / ROW_TILE) * ROW_TILE

    @property
    def padded_heads(self) -> int:
        """Heads after which no fetch leaves the array."""
        last = (self.kv_heads - 1) * self.group // ROW_TILE * ROW_TILE
        return max(last + self.columns, ceil(self.heads / ROW_TILE) * ROW_TILE)

    @property
    def copies_per_tile(self) -> int:
        """Pages that one tile of keys lies in."""
        return max(1, TILE // self.page_size)

    def shared_bytes(self, schedule: "Schedule") -> int:
        """Returns the shared memory that one block asks for, rounded up."""
        tiles = 2 * 2 * TILE * self.head_dim * schedule.stages
        queries_weights_and_out = 2 * self.columns * (2 * self.head_dim + TILE)
        share = 4 * self.columns * (self.head_dim + TILE) if schedule.cluster > 1 else 0
        return tiles + queries_weights_and_out + share * schedule.cluster + _OTHER_BYTES


@dataclass(frozen=True)
class Schedule:
    """How a row's keys are shared out: a function of static shapes only, so that rows never see each other.

    Attributes:
        cluster: blocks that join their shares in shared memory.
        parts: times as many shares, which XLA joins.
        stages: tiles of keys and of values in flight in each block.
    """

    cluster: int
    parts: int
    stages: int

    @classmethod
    def of(cls, geometry: Geometry, rows: int, capacity: int, window: int | None) -> "Schedule":
        """Chooses what was fastest on an H200 (NOTES.md).

        Args:
            geometry: the sizes of heads and pages.
            rows: rows of the call.
            capacity: keys that a row of the page table can hold.
            window: keys that a row sees, if fewer.
        """
        reach = capacity if window is None else min(capacity, window + TILE)
        tiles = ceil(reach / TILE)
        pairs = rows * geometry.kv_heads
        cluster = _fastest_cluster(geometry, pairs, tiles)
        parts = 1
        while 2 * pairs * cluster * parts <= _FEW_BLOCKS and tiles >= 64 * cluster * parts:
            parts *= 2
        stages = _most_stages(geometry, cls(cluster, parts, 1), pairs, tiles)
        return cls(cluster, parts, stages)

    def without_clusters(self) -> "Schedule":
        """The same shares for the interpreter, which has no stores into another block's shared memory."""
        return replace(self, cluster=1, parts=self.cluster * self.parts)


def _fastest_cluster(geometry: Geometry, pairs: int, tiles: int) -> int:
    """Returns how many blocks share a row's keys without a second launch.

    Clusters of four and more leave some multiprocessors without a block, and a grid of them that fills the GPU runs
    in two waves; a batch that fills the GPU anyway has its longest rows cut, so that none ends long after the rest.
    """
    cluster = 1
    while 2 * cluster <= min(MAX_CLUSTER, tiles):
        most_blocks = NUM_MULTIPROCESSORS if cluster == 1 else _FEW_BLOCKS
        if 2 * pairs * cluster > most_blocks or not _fits(geometry, Schedule(2 * cluster, 1, 2)):
            break
        cluster *= 2
    if cluster == 1:
        cut = 4 if tiles > 128 else 2 if tiles > 64 else 1
        cluster = cut if _fits(geometry, Schedule(cut, 1, 2)) else 1
    return cluster


def _most_stages(geometry: Geometry, shares: Schedule, pairs: int, tiles: int) -> int:
    """Returns how many tiles to keep in flight: two blocks on a multiprocessor come before deep pipelines."""
    tiles_per_share = ceil(tiles / (shares.cluster * shares.parts))
    most = min(tiles_per_share, 4 if tiles_per_share >= 32 else 3)
    many = pairs * shares.cluster * shares.parts > NUM_MULTIPROCESSORS
    for resident in (2, 1) if many else (1,):
        for stages in range(most, 1, -1):
            if _fits(geometry, replace(shares, stages=stages), resident):
                return stages
    return 1


def _fits(geometry: Geometry, schedule: Schedule, resident: int = 1) -> bool:
    """Tells whether so many blocks find room on one multiprocessor."""
    bytes_per_block = geometry.shared_bytes(schedule)
    taken = resident * (bytes_per_block + RESERVED_BYTES_PER_BLOCK)
    return bytes_per_block <= SHARED_BYTES_PER_BLOCK and taken <= SHARED_BYTES
