"""The loop of the decode kernel over keys and values of 8 bits, which are unpacked to float16 on the chip.

A key's scale multiplies its scores, a value's scale its weights, so that no component is multiplied. Weights times
scales may lie anywhere; the running maximum is that of them, so that the largest is 1 and float16 can hold them.
"""

from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns, over_rows
from pallas_kernels.mosaic.unpack_bytes import (
    gather_rows,
    load_left_operand,
    load_right_operand,
    unpack_values,
)
from pallas_kernels.paged_attention.mosaic_block import Block
from pallas_kernels.paged_attention.mosaic_schedule import TILE

# Scales of values below 2**this do not raise the maximum further, so that no sum of weights leaves float32.
_LEAST_SCALE = -100.0
_EXPONENT = 0x7F800000


class PackedTiles:
    """The tiles of a block's share."""

    def __init__(self, block: Block, *, interpret: bool) -> None:
        self.block, self.interpret = block, interpret

    def attend(self) -> tuple[Array, Array, Array]:
        """Takes all tiles into the softmax; returns `m`, `total` and `acc`."""
        block = self.block
        factor = self._prepare_queries()
        scales = self._scales(block.start, self._pages_of_rows(block.start))
        carried = scales, self._pages_of_rows(block.start + 1)
        state = (*block.initial_state(_LEAST_SCALE), carried)
        take = partial(self._take, factor=factor)
        m, total, acc, _ = lax.fori_loop(block.start, block.stop, take, state)
        return m, total, acc

    def _take(
        self, tile: Array, state: tuple[Any, ...], *, factor: Array | None
    ) -> tuple[Any, ...]:
        """Takes one tile.

        Its slots are free as soon as it was unpacked, behind the barrier that the products need anyway. Scales are
        read one tile ahead, and the ids of the pages that they lie in two.
        """
        block, refs = self.block, self.block.refs
        m, total, acc, ((k_scales, v_scales), pages_of_next) = state
        carried = self._scales(tile + 1, pages_of_next), self._pages_of_rows(tile + 2)
        later = tile + block.schedule.stages
        slot = block.slot(tile)
        plgpu.barrier_wait(refs["k_arrived"].at[slot])
        scores = self._multiply_keys(refs["k_tiles"].at[slot])
        scores *= over_columns(k_scales, scores.shape[1])
        if factor is not None:
            scores *= over_rows(factor, TILE)
        scores = block.shape_scores(scores)
        plgpu.barrier_wait(refs["v_arrived"].at[slot])
        hide = partial(self._hide, tile, scores, v_scales)
        scores, v_scales = lax.cond(block.is_edge(tile), hide, lambda: (scores, v_scales))
        sizes = jnp.maximum(jnp.log2(jnp.abs(v_scales)), _LEAST_SCALE)
        tops = scores + over_columns(sizes, scores.shape[1])
        m, total, p, decay = block.soften(m, total, scores, tops)
        p *= over_columns(v_scales, p.shape[1])
        self._unpack_values(tile, refs["v_tiles"].at[slot])

        def refill() -> None:
            # Ids read earlier would be waited for earlier, together with the scales: 13 against 10.5 us at batch 1.
            pl.when(later < block.stop)(partial(block.fetch_both, later, slot))

        update = block.multiply_values(refs["v_operand"], p, meanwhile=refill)
        return m, total, acc * decay + update, carried

    def _prepare_queries(self) -> Array | None:
        """Makes float16 queries, exactly: for those in bfloat16 returns what the scores are to be multiplied by."""
        refs, geometry = self.block.refs, self.block.geometry
        if self.interpret:
            queries = plgpu.load(refs["q_tile"].transpose((1, 0)), layout=WGMMA)
        else:
            queries = load_right_operand(refs["q_tile"], geometry.pages_dtype)
        factor = None
        if queries.dtype != geometry.operand:
            queries = queries.astype(jnp.float32)
            largest = jnp.max(jnp.abs(queries), axis=0)
            # The power of two below the largest, and one over it.
            bits = lax.bitcast_convert_type(largest, jnp.int32) & _EXPONENT
            factor = lax.bitcast_convert_type(bits, jnp.float32)
            inverse = lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
            queries *= over_rows(inverse, queries.shape[0])
        refs["q_operand"].transpose((1, 0))[...] = queries.astype(geometry.operand)
        plgpu.commit_smem()
        return factor

    def _multiply_keys(self, packed: Ref) -> Array:
        """Returns the product of 8-bit keys with the queries, 64 components of a head at a time."""
        geometry = self.block.geometry
        queries = self.block.refs["q_operand"].transpose((1, 0))
        # Many small pages take registers, too. With more than 128 a thread only three blocks are at work, not four.
        is_scarce = geometry.copies_per_tile > 1 and geometry.head_dim <= 128
        if self.interpret:
            return lax.dot(packed[...].astype(jnp.float32), queries[...].astype(jnp.float32))

        def product(accumulator: Ref) -> Array:
            for tall in range(packed.shape[1] // 64):
                piece = queries.at[pl.ds(64 * tall, 64)]
                plgpu.wgmma(accumulator, load_left_operand(packed, tall), piece)
                if is_scarce:
                    plgpu.wgmma_wait(0)
            return accumulator[...]

        return pl.run_scoped(product, plgpu.ACC((TILE, queries.shape[1]), jnp.float32))

    def _hide(self, tile: Array, scores: Array, v_scales: Array) -> tuple[Array, Array]:
        """Puts -inf for scores of keys that the row does not see, and zero for their values' scales."""
        visible = self.block.visible(tile, scores.shape)
        visible_rows = self.block.visible(tile, v_scales.shape, PER_ROW)
        return jnp.where(visible, scores, -jnp.inf), jnp.where(visible_rows, v_scales, 0.0)

    def _unpack_values(self, tile: Array, packed: Ref) -> None:
        """Makes 16-bit values of a tile in shared memory, zeros where the row must not see."""
        block, values = self.block, self.block.refs["v_operand"]
        if not self.interpret:
            bounds = (key - tile * TILE for key in (block.start_key, block.stop_key))
            unpack_values(packed, values, *bounds)
            return
        visible = block.visible(tile, values.shape)
        values[...] = jnp.where(visible, packed[...].astype(values.dtype), 0)

    def _pages_of_rows(self, tile: Array) -> Array:
        """Returns, for each key of a tile, the id of its page, as `Block.pages` does."""
        block = self.block
        page_size = block.geometry.page_size
        first, last = block.start_key // page_size, (block.stop_key - 1) // page_size
        entry = block.positions(tile, (TILE,), PER_ROW) // page_size
        entry = jnp.maximum(jnp.minimum(entry, last), first)
        return self._gather("page_table", block.row, entry)

    def _scales(self, tile: Array, pages: Array) -> tuple[Array, Array]:
        """Returns the scales of a tile's keys and values, one per row of scores."""
        block = self.block
        place = block.positions(tile, (TILE,), PER_ROW) % block.geometry.page_size
        # A row without keys has no page. Asked here, since a number is waited for where it is first used.
        pages = jnp.clip(pages, 0, block.refs["k_pages"].shape[0] - 1)
        at = (pages, place, block.kv_head)
        return self._gather("k_scales", *at), self._gather("v_scales", *at)

    def _gather(self, name: str, *indices: Array) -> Array:
        return gather_rows(self.block.refs[name], indices, interpret=self.interpret)
