"""The loop of the decode kernel over keys and values of 16 bits, which products take as they were fetched."""

from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, multiply
from pallas_kernels.paged_attention.mosaic_block import Block


class WideTiles:
    """The tiles of a block's share."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def attend(self) -> tuple[Array, Array, Array]:
        """Takes all tiles into the softmax; returns `m`, `total` and `acc`."""
        block = self.block
        no_pages = (jnp.int32(0),) * block.geometry.copies_per_tile
        state = (*block.initial_state(), no_pages)
        m, total, acc, _ = lax.fori_loop(block.start, block.stop, self._take, state)
        return m, total, acc

    def _take(self, tile: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Takes one tile.

        Copies into the slots that it frees start while a product runs, from page ids read long before: for keys
        at once, behind the maximum, which crosses warps; for values in the next call, behind a barrier of its own.
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
        scores = lax.cond(at_edge, partial(self._hide, tile, scores), lambda: scores)
        m, total, p, decay = block.soften(m, total, scores, scores)
        plgpu.barrier_wait(refs["v_arrived"].at[slot])
        values = refs["v_tiles"].at[slot]
        pl.when(at_edge)(partial(self._clear_hidden, tile, values))

        def refill_keys() -> None:
            pl.when(later < block.stop)(partial(block.fetch, "k", later, slot, pages))

        update = block.multiply_values(values, p, meanwhile=refill_keys)
        return m, total, acc * decay + update, pages

    def _refill_values(self, tile: Array, pages: tuple[Array, ...]) -> None:
        """Starts the copy of values into the slot of the tile before."""
        block = self.block
        later = tile - 1 + block.schedule.stages

        @pl.when((tile > block.start) & (later < block.stop))
        def _() -> None:
            plgpu.commit_smem()
            block.fetch("v", later, block.slot(later), pages)

    def _hide(self, tile: Array, scores: Array) -> Array:
        return jnp.where(self.block.visible(tile, scores.shape), scores, -jnp.inf)

    def _clear_hidden(self, tile: Array, values: Ref) -> None:
        """Zeroes values that the row must not see: a weight of zero does not silence a NaN."""
        loaded = plgpu.load(values, layout=WGMMA)
        visible = self.block.visible(tile, loaded.shape)
        values[...] = jnp.where(visible, loaded, jnp.zeros_like(loaded))
