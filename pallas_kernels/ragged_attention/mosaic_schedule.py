"""Geometry (sizes, limits) and schedule (tiles, stages, blocks) of the `ragged_attention` kernel; host code."""

from dataclasses import dataclass
from math import ceil, gcd

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import NUM_MULTIPROCESSORS, ROW_TILE, SHARED_BYTES_PER_BLOCK, WGMMA_ROWS
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.tuning import choose, round_up_to_power

# Consumer warpgroups, each of 64 rows: tokens x heads of a pack.
CONSUMERS = 2
# `Schedule.blocks` for one block per piece: larger than any number of pieces.
ONE_BLOCK_EACH = 2**30
# Bytes of shared memory for mbarriers, Mosaic's reductions and alignment.
_OTHER_BYTES = 3 * 1024


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_dim: components of a head.
        page_size: tokens per page.
        dtype: dtype of queries, output and the pages that the kernel reads.
        scaled: whether keys and values have scales. Scores and weights are then multiplied by them: 8-bit values are
            exact in bfloat16, their products with scales are not.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike
    scaled: bool = False

    @classmethod
    def of(cls, q: ArrayOrStruct, k_pages: ArrayOrStruct) -> "Geometry":
        """Returns the geometry of these queries and pages."""
        return cls(
            q.shape[1],
            k_pages.shape[2],
            q.shape[2],
            k_pages.shape[1],
            q.dtype,
            scaled=k_pages.dtype.itemsize == 1,
        )

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        name = jnp.dtype(self.dtype).name
        if name not in ("bfloat16", "float16"):
            return f"q must be bfloat16 or float16, got {name}"
        if self.scaled and name != "bfloat16":
            return f"with 8-bit pages q must be bfloat16, got {name}"
        if self.scaled and self.head_dim == 256:
            return "with 8-bit pages head_dim must be less than 256"
        if self.head_dim not in (64, 128, 192, 256):
            return f"head_dim must be 64, 128, 192 or 256, got {self.head_dim}"
        if self.page_size % ROW_TILE:
            return f"page_size must be a multiple of {ROW_TILE}, got {self.page_size}"
        return None

    def leaves_registers(self, window: int | None) -> bool:
        """Returns whether a persistent block's loop over pieces fits in registers."""
        odd_pages = self.page_size & (self.page_size - 1) and self.page_size % WGMMA_ROWS
        plain = window is None and not self.scaled and not odd_pages
        return plain and self.head_dim < 256 and self.page_size > ROW_TILE

    @property
    def pack(self) -> int:
        """Heads of one group in a tile of queries; they share each tile of keys."""
        return gcd(self.heads // self.kv_heads, WGMMA_ROWS // ROW_TILE)

    @property
    def units(self) -> int:
        """Number of packs of heads; the packs of one key head are adjacent."""
        return self.heads // self.pack

    @property
    def tokens_per_consumer(self) -> int:
        """Tokens in one consumer's 64 rows."""
        return WGMMA_ROWS // self.pack

    @property
    def tokens_per_tile(self) -> int:
        """Tokens in a block's tile of queries."""
        return CONSUMERS * self.tokens_per_consumer

    def copy_height(self, keys: int) -> int:
        """Returns the keys per TMA copy: the largest number that divides both a page and a tile of `keys` keys."""
        return gcd(self.page_size, keys)

    def shared_bytes(self, schedule: "Schedule") -> int:
        """Returns an upper bound of one block's shared memory in bytes."""
        keys_and_values = 2 * schedule.stages * schedule.keys
        queries = schedule.query_slots * CONSUMERS * WGMMA_ROWS
        return 2 * self.head_dim * (keys_and_values + queries) + _OTHER_BYTES


@dataclass(frozen=True)
class Schedule:
    """Tile sizes, pipeline stages and number of blocks; they depend on static shapes only.

    Attributes:
        keys: keys per tile.
        stages: tiles of keys and of values in flight in each block.
        query_slots: tiles of queries in each block; with two, the next one is copied during the current one's work.
        blocks: most blocks of the launch; with more pieces than blocks, each block loops over several pieces.
    """

    keys: int
    stages: int
    query_slots: int
    blocks: int

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, rows: int, window: int | None) -> "Schedule":
        """Returns the tuned schedule for these shapes on this device, or else that of `by_rule`.

        Under the fixed order of sums it is always that of `by_rule`, whose tiles of keys are equal for all shapes.

        Args:
            geometry: the sizes of heads and pages.
            tokens: queries of the call, padding included.
            rows: rows of the call.
            window: sliding window in keys, or `None`.
        """
        if is_fixed():
            return cls.by_rule(geometry, window)
        return choose(
            "ragged_attention",
            shape_class(geometry, tokens, rows, window),
            Schedule,
            is_possible=lambda schedule: schedule.is_possible(geometry, window),
            by_rule=lambda: Schedule.by_rule(geometry, window),
        )

    @classmethod
    def by_rule(cls, geometry: Geometry, window: int | None) -> "Schedule":
        """Returns a schedule by rules fitted to measurements on an H200 (NOTES.md); arguments as in `of`."""
        # Without a producer no registers are left for the scales of 128 keys and a window.
        is_scarce = geometry.scaled and window is not None and not honours_register_requests()
        keys = 128 if geometry.head_dim <= 128 and not is_scarce else 64
        blocks = NUM_MULTIPROCESSORS if geometry.leaves_registers(window) else ONE_BLOCK_EACH
        for query_slots in (2, 1):
            schedule = cls(keys, 2, query_slots, blocks)
            if geometry.shared_bytes(schedule) <= SHARED_BYTES_PER_BLOCK:
                break
        return schedule

    def is_possible(self, geometry: Geometry, window: int | None) -> bool:
        """Returns whether a block with this schedule fits in shared memory and registers."""
        widest = 128 if geometry.head_dim <= 128 else 64
        loops = self.blocks >= ONE_BLOCK_EACH or geometry.leaves_registers(window)
        fits = geometry.shared_bytes(self) <= SHARED_BYTES_PER_BLOCK
        some = self.query_slots > 0 and self.blocks > 0 and self.stages > 1
        return some and fits and loops and self.keys in (64, widest)


def shape_class(geometry: Geometry, tokens: int, rows: int, window: int | None) -> str:
    """Returns the shape class, the key of tuned schedules; tokens per row are rounded up to powers of two."""
    per_row = round_up_to_power(ceil(tokens / rows))
    reach = "all" if window is None else round_up_to_power(window)
    return (
        f"queries {per_row} window {reach} heads {geometry.heads}/{geometry.kv_heads}x{geometry.head_dim} "
        f"page {geometry.copy_height(128)} {jnp.dtype(geometry.dtype).name}{' of 8 bits' * geometry.scaled}"
    )


def most_tiles(tokens: int, rows: int, tokens_per_tile: int) -> int:
    """Returns an upper bound of the tiles that cover `tokens` tokens, for any lengths of `rows` rows and padding.

    Each row's first tile starts at a multiple of 8 tokens at or before the row's first token.
    """
    runs = min(rows + 1, tokens)
    return (tokens + runs * (tokens_per_tile + ROW_TILE - 2)) // tokens_per_tile
