"""The `skinny_matmul` kernel's loop over 16-bit weights, which wgmma reads directly from their stages."""

from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.skinny_matmul.mosaic_block import Block


def multiply_wide(block: Block, tile: Array) -> list[Array]:
    """Returns the sums of a tile, rows of the weight x rows of x.

    With fewer than 64 rows of the weight the product also reads what lies behind them: stages that may be refilled
    meanwhile. Rows of a product are independent, and the epilogue does not read those sums.
    """
    s, refs = block.schedule, block.refs

    def process_turn(sums: Ref, turn: Array, carry: None) -> None:
        step = tile * block.turns + turn
        slot = block.arrive(step)
        plgpu.wgmma(
            sums, refs["weights"].at[block.stage(slot)], refs["inputs"].at[slot].transpose((1, 0))
        )
        # Wait for the previous turn's product, so that its stage can be refilled.
        plgpu.wgmma_wait(1)
        block.refill(step - 1)
        return carry

    def multiply(sums: Ref) -> Array:
        lax.fori_loop(jnp.int32(0), jnp.int32(block.turns), partial(process_turn, sums), None)
        plgpu.wgmma_wait(0)
        return sums[...]

    shape = (s.product_rows(block.geometry), s.width(block.geometry))
    return [pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))]
