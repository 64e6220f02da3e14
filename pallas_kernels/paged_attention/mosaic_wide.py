"""The decode kernel's loop over tiles of 16-bit keys and values, which wgmma reads directly from their stages."""

from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, multiply
from pallas_kernels.paged_attention.mosaic_row import RowBlock


class WideTiles:
    """The loop over the tiles of a block's share."""

    def __init__(self, block: RowBlock) -> None:
        self.block = block

    def attend(self) -> tuple[Array, Array, Array]:
        """Runs the online softmax over all tiles; returns `m`, `total` and `acc`."""
        block = self.block
        no_pages = (jnp.int32(0),) * block.geometry.copies_per_tile
        state = (*block.initial_state(), no_pages)
        m, total, acc, _ = lax.fori_loop(block.start, block.stop, self._process_tile, state)
        return m, total, acc

    def _process_tile(self, tile: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Processes one tile and refills its stages while products run.

        Page ids for the refill are loaded at the top, long before their use. Keys are refilled during the second
        product: the maximum's reduction across warps has already synchronised all reads of them. Values are refilled
        during the first product of the next iteration, after a barrier of their own.
        """
        block, refs = self.block, self.block.refs
        m, total, acc, pages_before = state
        later = tile + block.schedule.stages
        pages, slot = block.pages(later), block.slot(tile)
        at_edge = block.is_edge(tile)
        plgpu.barrier_wait(refs["k_arrived"].at[slot])
        scores = multiply(
            refs["k_tiles"].at[slot],
            refs["q_tile"].transpose((1, 0)),
            meanwhile=partial(self._refill_values, tile, pages_before),
        )
        scores = block.shape_scores(scores)
        scores = lax.cond(at_edge, partial(self._mask_hidden, tile, scores), lambda: scores)
        m, total, p, decay = block.update_softmax(m, total, scores, scores)
        plgpu.barrier_wait(refs["v_arrived"].at[slot])
        values = refs["v_tiles"].at[slot]
        pl.when(at_edge)(partial(self._zero_hidden, tile, values))

        def refill_keys() -> None:
            pl.when(later < block.stop)(partial(block.fetch, "k", later, slot, pages))

        update = block.multiply_values(values, p, meanwhile=refill_keys)
        return m, total, acc * decay + update, pages

    def _refill_values(self, tile: Array, pages: tuple[Array, ...]) -> None:
        """Starts the copy of values into the stage of the previous tile."""
        block = self.block
        later = tile - 1 + block.schedule.stages

        @pl.when((tile > block.start) & (later < block.stop))
        def _() -> None:
            plgpu.commit_smem()
            block.fetch("v", later, block.slot(later), pages)

    def _mask_hidden(self, tile: Array, scores: Array) -> Array:
        return jnp.where(self.block.visible(tile, scores.shape), scores, -jnp.inf)

    def _zero_hidden(self, tile: Array, values: Ref) -> None:
        """Zeroes hidden values, because 0 * NaN is NaN."""
        loaded = plgpu.load(values, layout=WGMMA)
        visible = self.block.visible(tile, loaded.shape)
        assign(values, ..., jnp.where(visible, loaded, jnp.zeros_like(loaded)))
