"""The decode kernel's loop over tiles of 8-bit keys and values, which it converts to float16 on the chip.

A key's scale multiplies its scores and a value's scale its softmax weight, so no component is multiplied by a scale.
A weight times a scale could exceed float16's range. Therefore the running maximum is that of score + log2(scale), and
the largest product is 1.
"""

from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign, honours_register_requests
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns, over_rows
from pallas_kernels.mosaic.unpack_bytes import (
    gather_rows,
    load_left_operand,
    load_right_operand,
    unpack_values,
)
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.paged_attention.mosaic_row import RowBlock
from pallas_kernels.paged_attention.mosaic_schedule import TILE

# Lower bound of log2(scale) in the running maximum: it keeps the sum of weights within float32.
_LEAST_SCALE = -100.0
_EXPONENT = 0x7F800000


class PackedTiles:
    """The loop over the tiles of a block's share."""

    def __init__(self, block: RowBlock, *, interpret: bool) -> None:
        self.block, self.interpret = block, interpret

    def attend(self) -> tuple[Array, Array, Array]:
        """Runs the online softmax over all tiles; returns `m`, `total` and `acc`."""
        block = self.block
        factor = self._prepare_queries()
        scales = self._scales(block.start, self._pages_of_rows(block.start))
        carried = scales, self._pages_of_rows(block.start + 1)
        state = (*block.initial_state(_LEAST_SCALE), carried)
        process = partial(self._process_tile, factor=factor)
        m, total, acc, _ = lax.fori_loop(block.start, block.stop, process, state)
        return m, total, acc

    def _process_tile(
        self, tile: Array, state: tuple[Any, ...], *, factor: Array | None
    ) -> tuple[Any, ...]:
        """Processes one tile.

        The tile's stage is free once its values are converted; the barrier before the second product covers that.
        Scales are loaded one tile ahead, and the ids of their pages two tiles ahead.
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
        mask = partial(self._mask_hidden, tile, scores, v_scales)
        scores, v_scales = lax.cond(block.is_edge(tile), mask, lambda: (scores, v_scales))
        sizes = jnp.maximum(jnp.log2(jnp.abs(v_scales)), _LEAST_SCALE)
        tops = scores + over_columns(sizes, scores.shape[1])
        m, total, p, decay = block.update_softmax(m, total, scores, tops)
        p *= over_columns(v_scales, p.shape[1])
        self._unpack_values(tile, refs["v_tiles"].at[slot])

        def refill() -> None:
            # Page ids are loaded here: a load further up would also wait for the scales (13 instead of 10.5 us at
            # batch 1; NOTES.md).
            pl.when(later < block.stop)(partial(self._fetch, later, slot))

        update = block.multiply_values(refs["v_operand"], p, meanwhile=refill)
        return m, total, acc * decay + update, carried

    def _fetch(self, tile: Array, slot: Array) -> None:
        """Starts the copies of a tile."""
        block = self.block
        if honours_register_requests() or block.geometry.copies_per_tile == 1:
            block.fetch_both(tile, slot)
            return
        # JAX 0.12's assembler takes 129 registers if one warp starts all copies, one too many for four blocks on an SM.
        pages = block.pages(tile)
        fetches = [partial(block.fetch, pool, tile, slot, pages) for pool in ("k", "v")]
        on_warps(*fetches, interpret=self.interpret)

    def _prepare_queries(self) -> Array | None:
        """Converts the queries to float16; returns the factor of the scores per query, `None` for float16 queries.

        bfloat16 queries are divided by a power of two per head, which is exact.
        """
        refs, geometry = self.block.refs, self.block.geometry
        if self.interpret:
            queries = plgpu.load(refs["q_tile"].transpose((1, 0)), layout=WGMMA)
        else:
            queries = load_right_operand(refs["q_tile"], geometry.pages_dtype)
        factor = None
        if queries.dtype != geometry.operand:
            queries = queries.astype(jnp.float32)
            largest = jnp.max(jnp.abs(queries), axis=0)
            # The largest magnitude rounded down to a power of two, and its inverse.
            bits = lax.bitcast_convert_type(largest, jnp.int32) & _EXPONENT
            factor = lax.bitcast_convert_type(bits, jnp.float32)
            inverse = lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
            queries *= over_rows(inverse, queries.shape[0])
        assign(refs["q_operand"].transpose((1, 0)), ..., queries.astype(geometry.operand))
        plgpu.commit_smem()
        return factor

    def _multiply_keys(self, packed: Ref) -> Array:
        """Returns the product of 8-bit keys with the queries, 64 components of a head at a time."""
        geometry = self.block.geometry
        queries = self.block.refs["q_operand"].transpose((1, 0))
        # The copies of many small pages need registers, too. Above 128 registers per thread only three blocks instead
        # of four are resident on an SM.
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

    def _mask_hidden(self, tile: Array, scores: Array, v_scales: Array) -> tuple[Array, Array]:
        """Sets the scores of hidden keys to -inf and the scales of their values to zero."""
        visible = self.block.visible(tile, scores.shape)
        visible_rows = self.block.visible(tile, v_scales.shape, PER_ROW)
        return jnp.where(visible, scores, -jnp.inf), jnp.where(visible_rows, v_scales, 0.0)

    def _unpack_values(self, tile: Array, packed: Ref) -> None:
        """Converts a tile's values to 16 bits in shared memory; hidden ones become zeros."""
        block, values = self.block, self.block.refs["v_operand"]
        if not self.interpret:
            bounds = (key - tile * TILE for key in (block.start_key, block.stop_key))
            unpack_values(packed, values, *bounds)
            return
        visible = block.visible(tile, values.shape)
        assign(values, ..., jnp.where(visible, packed[...].astype(values.dtype), 0))

    def _pages_of_rows(self, tile: Array) -> Array:
        """Returns the page id of each key of a tile; keys outside of the visible range get the nearest visible page."""
        block = self.block
        page_size = block.geometry.page_size
        first, last = block.start_key // page_size, (block.stop_key - 1) // page_size
        entry = block.positions(tile, (TILE,), PER_ROW) // page_size
        entry = jnp.maximum(jnp.minimum(entry, last), first)
        return self._gather("page_table", block.row, entry)

    def _scales(self, tile: Array, pages: Array) -> tuple[Array, Array]:
        """Loads the scales of a tile's keys and values, one per row of the scores."""
        block = self.block
        place = block.positions(tile, (TILE,), PER_ROW) % block.geometry.page_size
        # An empty row has no valid page id, so clip. The clip is here and not in `_pages_of_rows`, because a load
        # stalls at its first use.
        pages = jnp.clip(pages, 0, block.refs["k_pages"].shape[0] - 1)
        at = (pages, place, block.kv_head)
        return self._gather("k_scales", *at), self._gather("v_scales", *at)

    def _gather(self, name: str, *indices: Array) -> Array:
        return gather_rows(self.block.refs[name], indices, interpret=self.interpret)
