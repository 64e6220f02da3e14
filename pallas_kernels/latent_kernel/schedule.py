"""Geometry (sizes, limits) and schedule (clusters, split-K parts) of the `latent_attention` kernels; host code."""

from dataclasses import dataclass
from math import ceil

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import NUM_MULTIPROCESSORS, ROW_TILE, WGMMA_ROWS
from pallas_kernels.tuning import choose, round_up_to_power

# Keys per tile. A block's 64 rows, M of one wgmma, are queries x heads.
TILE = 64
# Pipeline stages: tiles in a block's shared memory. Each of its two consumers computes the scores of one of them.
SLOTS = 2
# Columns of a 128-byte swizzled piece of 16-bit elements.
COLUMN_TILE = 64
CLUSTERS = (1, 2, 4, 8)
# Most heads for the kernel with keys on the left: all components of their outputs must fit in registers.
MOST_LEFT_HEADS = 32
# Least pairs of tiles per share; fewer do not pay for the combination.
_FEWEST_PAIRS = 2


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        heads: number of heads after padding (`filled_heads`): a multiple of 8 up to 64, or a multiple of 64.
        width: components of a latent, the rotary ones included.
        value_dim: components of a latent that are its value.
        page_size: tokens per page.
        dtype: dtype of queries, latents and output.
        packed: whether queries are packed, any number per row; otherwise each row has one.
    """

    heads: int
    width: int
    value_dim: int
    page_size: int
    dtype: DTypeLike
    packed: bool

    @classmethod
    def of(
        cls, q: ArrayOrStruct, latent_pages: ArrayOrStruct, value_dim: int, *, packed: bool
    ) -> "Geometry":
        """Returns the geometry of these queries and pages."""
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
                f"a latent must have {COLUMN_TILE} components more than value_dim, got {self.width} "
                f"and {self.value_dim}"
            )
        if self.page_size % TILE and self.page_size not in (8, 16, 32):
            return f"page_size must be 8, 16, 32 or a multiple of {TILE}, got {self.page_size}"
        return None

    @property
    def block_heads(self) -> int:
        """Heads per block."""
        return min(self.heads, WGMMA_ROWS)

    @property
    def blocks(self) -> int:
        """Blocks among which the heads of a query are divided."""
        return self.heads // self.block_heads

    @property
    def tokens_per_piece(self) -> int:
        """Most queries of a piece."""
        return WGMMA_ROWS // self.block_heads if self.packed else 1

    @property
    def keys_are_left(self) -> bool:
        """Whether keys and values are the left operands of wgmma, and queries the right ones."""
        return not self.packed and self.heads <= MOST_LEFT_HEADS

    @property
    def half(self) -> int:
        """Columns of the values that one consumer multiplies."""
        return self.value_dim // 2

    @property
    def copies_per_tile(self) -> int:
        """Pages, and so TMA copies, per tile of keys."""
        return max(1, TILE // self.page_size)


@dataclass(frozen=True)
class Schedule:
    """The division of a row's keys among blocks.

    It depends on static shapes only, so a row's result does not depend on the other rows.

    Attributes:
        cluster: blocks of a cluster, which combine their shares in distributed shared memory.
        parts: shares that XLA combines in a second launch; more than 1 only without clusters.
    """

    cluster: int
    parts: int

    @classmethod
    def of(cls, geometry: Geometry, pieces: int, capacity: int) -> "Schedule":
        """Returns the tuned schedule for these shapes on this device, or else that of `by_rule`.

        Args:
            geometry: the sizes of heads and pages.
            pieces: number of pieces of work.
            capacity: most keys of a row: page table columns * page size.
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
        """Returns a schedule by rules fitted to measurements on an H200 (NOTES.md); arguments as in `of`."""
        blocks = pieces * geometry.blocks
        wanted = shares_that_fit(blocks, capacity)
        if wanted > 2 and not geometry.packed:
            return cls(1, wanted)
        # In a grid that fills the GPU, large clusters leave some SMs without a block.
        most = CLUSTERS[-1] if 2 * blocks * CLUSTERS[-1] <= NUM_MULTIPROCESSORS else 2
        found = [cls(cluster, 1) for cluster in CLUSTERS if cluster <= max(1, min(wanted, most))]
        return [schedule for schedule in found if schedule.divides(geometry)][-1]

    @property
    def shares(self) -> int:
        """Number of shares that a row's keys are cut into."""
        return self.cluster * self.parts

    def divides(self, geometry: Geometry) -> bool:
        """Returns whether each block of a cluster combines whole pieces of 64 columns."""
        return geometry.value_dim % (self.cluster * COLUMN_TILE) == 0

    def is_possible(self, geometry: Geometry, capacity: int) -> bool:
        """Returns whether the schedule fits the hardware and leaves no share of a full row empty."""
        if self.cluster not in CLUSTERS or self.parts < 1:
            return False
        if self.parts > 1 and (geometry.packed or self.cluster > 1):
            return False
        return self.divides(geometry) and self.shares <= max(1, pairs_of(capacity))

    def without_clusters(self, geometry: Geometry) -> "Schedule":
        """Returns the schedule with parts instead of clusters, for the interpreter.

        The interpreter has no stores into another block's shared memory. Packed queries cannot have parts, so they
        get one share.
        """
        return Schedule(1, 1 if geometry.packed else self.shares)


def filled_heads(heads: int) -> int:
    """Returns the number of heads after padding: a multiple of 8 up to 64, or a multiple of 64."""
    unit = ROW_TILE if heads <= WGMMA_ROWS else WGMMA_ROWS
    return ceil(heads / unit) * unit


def pairs_of(capacity: int) -> int:
    """Returns the number of pairs of tiles of a full row."""
    return ceil(capacity / (SLOTS * TILE))


def shares_that_fit(blocks: int, capacity: int) -> int:
    """Returns the number of shares per row that fill the GPU's SMs; 0 if the blocks fill them without a split."""
    return min(NUM_MULTIPROCESSORS // blocks, pairs_of(capacity) // _FEWEST_PAIRS)


def shape_class(geometry: Geometry, pieces: int, capacity: int) -> str:
    """Returns the shape class, the key of tuned schedules; pieces and keys are rounded up to powers of two."""
    queries = "packed" if geometry.packed else "rows"
    return (
        f"{queries} {round_up_to_power(pieces)} keys {round_up_to_power(capacity)} heads {geometry.heads}x"
        f"{geometry.width} page {min(geometry.page_size, TILE)} {jnp.dtype(geometry.dtype).name}"
    )
