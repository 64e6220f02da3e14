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
MAX_STAGES = 6
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
        """Chooses shares that give each multiprocessor a block, and as many stages as then fit.

        Args:
            geometry: the sizes of heads and pages.
            rows: rows of the call.
            capacity: keys that a row of the page table can hold.
            window: keys that a row sees, if fewer.
        """
        reach = capacity if window is None else min(capacity, window + TILE)
        tiles = ceil(reach / TILE)
        pairs = rows * geometry.kv_heads
        cluster, parts = 1, 1
        while (
            cluster < min(MAX_CLUSTER, tiles)
            and 2 * pairs * cluster <= NUM_MULTIPROCESSORS
            and geometry.shared_bytes(cls(2 * cluster, 1, 2)) <= SHARED_BYTES_PER_BLOCK
        ):
            cluster *= 2
        while 64 * cluster * parts <= tiles and 2 * pairs * cluster * parts <= NUM_MULTIPROCESSORS:
            parts *= 2
        resident = min(3, ceil(pairs * cluster * parts / NUM_MULTIPROCESSORS))
        budget = min(SHARED_BYTES_PER_BLOCK, SHARED_BYTES // resident - RESERVED_BYTES_PER_BLOCK)
        most = min(MAX_STAGES, ceil(tiles / (cluster * parts)))
        fitting = [
            stages
            for stages in range(1, most + 1)
            if geometry.shared_bytes(cls(cluster, parts, stages)) <= budget
        ]
        return cls(cluster, parts, max(fitting, default=min(2, most)))

    def without_clusters(self) -> "Schedule":
        """The same shares for the interpreter, which has no stores into another block's shared memory."""
        return replace(self, cluster=1, parts=self.cluster * self.parts)
