"""The sizes of the Mosaic GPU kernel of `ragged_attention` and of its schedule. Traces nothing."""

from dataclasses import dataclass
from math import ceil, gcd

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.device import NUM_MULTIPROCESSORS, ROW_TILE, SHARED_BYTES_PER_BLOCK, WGMMA_ROWS
from pallas_kernels.tuning import choose

# Warpgroups that multiply, each for 64 rows: queries times heads.
CONSUMERS = 2
# More blocks than there can be pieces of work.
ONE_BLOCK_EACH = 2**30
# Shared memory that no formula counts: barriers, the scratch of reductions, alignment.
_OTHER_BYTES = 3 * 1024


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from; `scaled` if keys and values have scales.

    Scores and weights are then multiplied by them: the numbers of 8-bit pages are exact in bfloat16, but their
    products with scales would not be.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike
    scaled: bool = False

    @classmethod
    def of(cls, q: Array, k_pages: Array) -> "Geometry":
        """Returns the sizes of these queries and pages."""
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
            return f"with pages of 8 bits q must be bfloat16, got {name}"
        if self.scaled and self.head_dim == 256:
            return "with pages of 8 bits head_dim must be less than 256"
        if self.head_dim not in (64, 128, 192, 256):
            return f"head_dim must be 64, 128, 192 or 256, got {self.head_dim}"
        if self.page_size % ROW_TILE:
            return f"page_size must be a multiple of {ROW_TILE}, got {self.page_size}"
        return None

    def leaves_registers(self, window: int | None) -> bool:
        """Tells whether a block can keep in registers what it needs to take one piece of work after another."""
        odd_pages = self.page_size & (self.page_size - 1) and self.page_size % WGMMA_ROWS
        plain = window is None and not self.scaled and not odd_pages
        return plain and self.head_dim < 256 and self.page_size > ROW_TILE

    @property
    def pack(self) -> int:
        """Heads of one group that share a tile of queries, so that they share each tile of keys."""
        return gcd(self.heads // self.kv_heads, WGMMA_ROWS // ROW_TILE)

    @property
    def units(self) -> int:
        """Packs of heads; those of one key head are neighbours."""
        return self.heads // self.pack

    @property
    def tokens_per_consumer(self) -> int:
        """Tokens that one consumer takes at once, with each head of a pack."""
        return WGMMA_ROWS // self.pack

    @property
    def tokens_per_tile(self) -> int:
        """Tokens that one block takes at once."""
        return CONSUMERS * self.tokens_per_consumer

    def copy_height(self, keys: int) -> int:
        """Keys that one copy brings: the most that a page and a tile of `keys` keys can both be cut into."""
        return gcd(self.page_size, keys)

    def shared_bytes(self, schedule: "Schedule") -> int:
        """Returns the shared memory that one block asks for, rounded up."""
        keys_and_values = 2 * schedule.stages * schedule.keys
        queries = schedule.query_slots * CONSUMERS * WGMMA_ROWS
        return 2 * self.head_dim * (keys_and_values + queries) + _OTHER_BYTES


@dataclass(frozen=True)
class Schedule:
    """How the work is laid out over a block and over the device: a function of static shapes only.

    Attributes:
        keys: keys per turn.
        stages: tiles of keys and of values in flight in each block.
        query_slots: tiles of queries in each block; with two, the next one arrives while this one is worked on.
        blocks: most blocks of the launch; if there are more pieces of work, each takes one after another.
    """

    keys: int
    stages: int
    query_slots: int
    blocks: int

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, rows: int, window: int | None) -> "Schedule":
        """Chooses the schedule that was tuned for shapes like these, or else one by rule.

        Args:
            geometry: the sizes of heads and pages.
            tokens: queries of the call, padding included.
            rows: rows of the call.
            window: keys that a query sees, if fewer than all.
        """
        return choose(
            "ragged_attention",
            shape_class(geometry, tokens, rows, window),
            Schedule,
            is_possible=lambda schedule: schedule.is_possible(geometry, window),
            by_rule=lambda: Schedule.by_rule(geometry, window),
        )

    @classmethod
    def by_rule(cls, geometry: Geometry, window: int | None) -> "Schedule":
        """Chooses what was fastest on an H200 for shapes like these (NOTES.md); arguments as in `of`."""
        keys = 128 if geometry.head_dim <= 128 else 64
        blocks = NUM_MULTIPROCESSORS if geometry.leaves_registers(window) else ONE_BLOCK_EACH
        for query_slots in (2, 1):
            schedule = cls(keys, 2, query_slots, blocks)
            if geometry.shared_bytes(schedule) <= SHARED_BYTES_PER_BLOCK:
                break
        return schedule

    def is_possible(self, geometry: Geometry, window: int | None) -> bool:
        """Tells whether a block with this schedule finds room, in shared memory and in registers."""
        widest = 128 if geometry.head_dim <= 128 else 64
        loops = self.blocks >= ONE_BLOCK_EACH or geometry.leaves_registers(window)
        fits = geometry.shared_bytes(self) <= SHARED_BYTES_PER_BLOCK
        some = self.query_slots > 0 and self.blocks > 0 and self.stages > 1
        return some and fits and loops and self.keys in (64, widest)


def shape_class(geometry: Geometry, tokens: int, rows: int, window: int | None) -> str:
    """Returns the name of the shapes that share a tuned schedule: tokens per row are rounded up to powers of two."""
    per_row = 1 << (ceil(tokens / rows) - 1).bit_length()
    reach = "all" if window is None else 1 << (window - 1).bit_length()
    return (
        f"queries {per_row} window {reach} heads {geometry.heads}/{geometry.kv_heads}x{geometry.head_dim} "
        f"page {geometry.copy_height(128)} {jnp.dtype(geometry.dtype).name}{' of 8 bits' * geometry.scaled}"
    )


def most_tiles(tokens: int, rows: int, tokens_per_tile: int) -> int:
    """Returns how many tiles cover `tokens` tokens, however they are shared out over `rows` rows and padding.

    Each row's first tile starts at a multiple of 8 tokens at or before the row.
    """
    runs = min(rows + 1, tokens)
    return (tokens + runs * (tokens_per_tile + ROW_TILE - 2)) // tokens_per_tile
