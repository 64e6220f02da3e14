"""The sizes of the Mosaic GPU kernel of `latent_attention`, and how it shares out the keys. Traces nothing."""

from dataclasses import dataclass
from math import ceil

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.device import NUM_MULTIPROCESSORS, ROW_TILE, WGMMA_ROWS
from pallas_kernels.tuning import choose

# Keys that a block takes at once. Its rows are queries times heads, as many as one wgmma takes.
TILE = 64
# Tiles that a block holds; its two consumers own every other one.
SLOTS = 2
# Columns of one swizzled piece.
COLUMN_TILE = 64
CLUSTERS = (1, 2, 4, 8)
# Heads up to which keys stand on the left: all components of their outputs must fit into registers.
MOST_LEFT_HEADS = 32
# Pairs of tiles below which a share is not worth its part of the join.
_FEWEST_PAIRS = 2


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from.

    Attributes:
        heads: a multiple of 8 up to 64, or of 64; `filled_heads` says which.
        width: numbers of a latent, the rotary ones included.
        value_dim: those of them that are the value.
        packed: queries are packed, several of a row; or else each row has one.
    """

    heads: int
    width: int
    value_dim: int
    page_size: int
    dtype: DTypeLike
    packed: bool

    @classmethod
    def of(cls, q: Array, latent_pages: Array, value_dim: int, *, packed: bool) -> "Geometry":
        """Returns the sizes of these queries and pages."""
        heads = filled_heads(q.shape[1])
        return cls(heads, q.shape[2], value_dim, latent_pages.shape[1], q.dtype, packed)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        name = jnp.dtype(self.dtype).name
        if name not in ("bfloat16", "float16"):
            return f"q must be bfloat16 or float16, got {name}"
        if self.value_dim not in (128, 256, 384, 512):
            return f"value_dim must be 128, 256, 384 or 512, got {self.value_dim}"
        if self.width - self.value_dim != COLUMN_TILE:
            return (
                f"a latent must be {COLUMN_TILE} numbers wider than value_dim, got {self.width} "
                f"and {self.value_dim}"
            )
        if self.page_size % TILE and self.page_size not in (8, 16, 32):
            return f"page_size must be 8, 16, 32 or a multiple of {TILE}, got {self.page_size}"
        return None

    @property
    def block_heads(self) -> int:
        """Heads that a block works on."""
        return min(self.heads, WGMMA_ROWS)

    @property
    def blocks(self) -> int:
        """Blocks that share the heads of a query."""
        return self.heads // self.block_heads

    @property
    def tokens_per_piece(self) -> int:
        """Queries that a block works on at once."""
        return WGMMA_ROWS // self.block_heads if self.packed else 1

    @property
    def keys_are_left(self) -> bool:
        """Whether keys and values stand on the left of products, and queries on the right."""
        return not self.packed and self.heads <= MOST_LEFT_HEADS

    @property
    def half(self) -> int:
        """Components of the value that one consumer multiplies."""
        return self.value_dim // 2

    @property
    def copies_per_tile(self) -> int:
        """Pages that one tile of keys lies in."""
        return max(1, TILE // self.page_size)


@dataclass(frozen=True)
class Schedule:
    """How a row's keys are shared out: a function of static shapes only, so that rows never see each other.

    Attributes:
        cluster: blocks that join their shares in shared memory.
        parts: shares that XLA joins, where they are not joined so.
    """

    cluster: int
    parts: int

    @classmethod
    def of(cls, geometry: Geometry, pieces: int, capacity: int) -> "Schedule":
        """Takes what was measured to be fastest for such shapes on this device, or else what the rules say.

        Args:
            geometry: the sizes of heads and pages.
            pieces: pieces of work, each of a query or a few of one row.
            capacity: keys that a row of the page table can hold.
        """
        return choose(
            "latent_attention",
            shape_class(geometry, pieces, capacity),
            Schedule,
            is_possible=lambda schedule: schedule.is_possible(geometry, capacity),
            by_rule=lambda: Schedule.by_rule(geometry, pieces, capacity),
        )

    @classmethod
    def by_rule(cls, geometry: Geometry, pieces: int, capacity: int) -> "Schedule":
        """Chooses what was fastest on an H200 for shapes like these (NOTES.md); arguments as in `of`."""
        blocks = pieces * geometry.blocks
        wanted = shares_that_fit(blocks, capacity)
        if wanted > 2 and not geometry.packed:
            return cls(1, wanted)
        # Large clusters leave some multiprocessors without a block where the grid would fill them all.
        most = CLUSTERS[-1] if 2 * blocks * CLUSTERS[-1] <= NUM_MULTIPROCESSORS else 2
        found = [cls(cluster, 1) for cluster in CLUSTERS if cluster <= max(1, min(wanted, most))]
        return [schedule for schedule in found if schedule.divides(geometry)][-1]

    @property
    def shares(self) -> int:
        """Shares that a row's keys are cut into."""
        return self.cluster * self.parts

    def divides(self, geometry: Geometry) -> bool:
        """Tells whether each block of a cluster gets whole pieces of columns to join."""
        return geometry.value_dim % (self.cluster * COLUMN_TILE) == 0

    def is_possible(self, geometry: Geometry, capacity: int) -> bool:
        """Tells whether the hardware can run it, and no share of a full row is empty."""
        if self.cluster not in CLUSTERS or self.parts < 1:
            return False
        if self.parts > 1 and (geometry.packed or self.cluster > 1):
            return False
        return self.divides(geometry) and self.shares <= max(1, pairs_of(capacity))

    def without_clusters(self, geometry: Geometry) -> "Schedule":
        """As many shares for the interpreter, if XLA can join them: it has no stores into another block's memory."""
        return Schedule(1, 1 if geometry.packed else self.shares)


def filled_heads(heads: int) -> int:
    """Returns how many heads the kernel is given for so many: whole tiles of rows, or whole blocks of 64."""
    unit = ROW_TILE if heads <= WGMMA_ROWS else WGMMA_ROWS
    return ceil(heads / unit) * unit


def pairs_of(capacity: int) -> int:
    """Returns the most pairs of tiles, one for each consumer, that a row has."""
    return ceil(capacity / (SLOTS * TILE))


def shares_that_fit(blocks: int, capacity: int) -> int:
    """Returns into how many shares the keys of each block may be cut; 0 where the blocks alone fill the card."""
    return min(NUM_MULTIPROCESSORS // blocks, pairs_of(capacity) // _FEWEST_PAIRS)


def shape_class(geometry: Geometry, pieces: int, capacity: int) -> str:
    """Returns the name of the shapes that share a tuned schedule: pieces and reach are rounded up to powers of two."""
    queries = "packed" if geometry.packed else "rows"
    return (
        f"{queries} {_round_up_to_power(pieces)} keys {_round_up_to_power(capacity)} heads {geometry.heads}x"
        f"{geometry.width} page {min(geometry.page_size, TILE)} {jnp.dtype(geometry.dtype).name}"
    )


def _round_up_to_power(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()
