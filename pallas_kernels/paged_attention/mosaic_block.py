"""What the blocks of both Mosaic GPU kernels of `paged_attention` do to tiles of keys on Hopper: TMA copies, scores.

A block has one warpgroup and one key head. Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Mapping
from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.paged_attention.mosaic_schedule import TILE, Geometry, Schedule


def tiles_of_part(tiles: Array, part: Array | int, parts: Array | int) -> tuple[Array, Array]:
    """Returns the tiles [start, stop) of a part, where `parts` parts divide `tiles` tiles; part 0 has some if any."""
    start, stop = tiles * part + parts - 1, tiles * (part + 1) + parts - 1
    return start // parts, stop // parts


class Block:
    """The keys [start_key, stop_key) of a row, in tiles; a subclass says which tiles, and for which queries.

    Args:
        geometry: sizes of heads and pages.
        options: scale, window and soft cap.
        schedule: clusters, parts and stages.
        refs: the arrays and the scratch memory by name.
        row: row of the page table.
        stop_key: number of keys; with a window its last ones count.

    Attributes:
        start, stop: the tiles of the block.
    """

    start: Array
    stop: Array

    def __init__(
        self,
        geometry: Geometry,
        options: ScoreOptions,
        schedule: Schedule,
        refs: Mapping[str, Ref],
        *,
        row: Array,
        stop_key: Array,
    ) -> None:
        self.geometry, self.options, self.schedule = geometry, options, schedule
        self.refs, self.row, self.kv_head = refs, row, lax.axis_index("kv_head")
        first_head = self.kv_head * geometry.group // ROW_TILE * ROW_TILE
        self.first_query = pl.multiple_of(first_head, ROW_TILE)
        window = options.window
        self.stop_key = stop_key
        self.start_key = jnp.int32(0) if window is None else jnp.maximum(stop_key - window, 0)

    def fetch_first(self) -> None:
        """Starts the copies of the first `stages` tiles."""
        for slot in range(self.schedule.stages):
            tile = self.start + slot
            pl.when(tile < self.stop)(partial(self.fetch_both, tile, slot))

    def slot(self, tile: Array) -> Array:
        """Returns the pipeline stage that holds a tile."""
        return lax.rem(tile - self.start, jnp.int32(self.schedule.stages))

    def fetch_both(self, tile: Array, slot: Array | int) -> None:
        """Starts the TMA copies of a tile of keys and of values."""
        pages = self.pages(tile)
        self.fetch("k", tile, slot, pages)
        self.fetch("v", tile, slot, pages)

    def pages(self, tile: Array) -> tuple[Array, ...]:
        """Returns the page ids of one tile; pages without a visible key are replaced by the nearest one with any."""
        page_size = self.geometry.page_size
        first, last = self.start_key // page_size, (self.stop_key - 1) // page_size
        entries = [tile * TILE // page_size + copy for copy in range(self.geometry.copies_per_tile)]
        return tuple(
            self.refs["page_table"][self.row, jnp.clip(entry, first, last)] for entry in entries
        )

    def fetch(self, pool: str, tile: Array, slot: Array | int, pages: tuple[Array, ...]) -> None:
        """Starts the TMA copies of one tile from the "k" or "v" pool into a stage.

        All warps must have passed a barrier since the last read of the stage.
        """
        refs, page_size = self.refs, self.geometry.page_size
        height = min(page_size, TILE)
        offset = pl.multiple_of(tile * TILE % page_size, TILE) if page_size > TILE else 0
        for copy, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                refs[f"{pool}_pages"].at[page, pl.ds(offset, height), self.kv_head],
                refs[f"{pool}_tiles"].at[slot, pl.ds(copy * height, height)],
                refs[f"{pool}_arrived"].at[slot],
            )

    def shape_scores(self, scores: Array) -> Array:
        """Scales and caps scores, and multiplies them by log2(e) for exp2."""
        scale, cap = self.options.scale, self.options.soft_cap
        if cap is None:
            return scores * (scale * LOG2_E)
        # tanh from exp2 and a division; the hardware's `tanh.approx` errs by up to 5e-4.
        scores = 1.0 - 2.0 / (jnp.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)
        return scores * (cap * LOG2_E)
