"""The `skinny_matmul` kernel's loop over weights in 8 and 4 bits for few rows of x: every warp has a fold of its own.

Factors of the next turn are loaded at the end of a turn.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.mosaic.few_bits_by_warp import HEIGHT, add_warp_products, load_factors
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA
from pallas_kernels.skinny_matmul.mosaic_block import Block


def multiply_few_bits_by_warp(block: Block, tile: Array, *, interpret: bool) -> list[Array]:
    """Returns the sums of a tile: array t has rows [16 t, 16 t + 16) of each fold, fold after fold."""
    s, g, refs, packing = block.schedule, block.geometry, block.refs, block.geometry.packing
    assert packing is not None
    width, chunk = g.padded_rows, s.chunk(g)
    count = g.parts * s.columns // HEIGHT
    arrays = {name: refs[name] for name in packing.names}
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=PER_ROW)
    fold = lax.shift_right_logical(row, jnp.int32(HEIGHT.bit_length() - 1))
    column = block.first_column(tile) + (row & (HEIGHT - 1))

    def factors_of(turn: Array) -> list[list[Array]]:
        begin = (block.share * block.turns + turn) * s.folds
        groups = lax.div((begin + fold) * chunk, jnp.int32(packing.group))
        starts = [divmod(index * HEIGHT, s.columns) for index in range(count)]
        return [
            load_factors(
                arrays, column + part * g.out + start, groups, chunk, packing, interpret=interpret
            )
            for part, start in starts
        ]

    def process_turn(
        turn: Array, carry: tuple[list[Array], list[list[Array]]]
    ) -> tuple[list[Array], list[list[Array]]]:
        sums, factors = carry
        step = tile * block.turns + turn
        slot = block.arrive(step)
        codes, x = refs["weights"].at[block.stage(slot)], refs["inputs"].at[slot]
        sums = add_warp_products(sums, codes, x, factors, packing, interpret=interpret)
        block.refill(step)
        # Behind the fence of `refill`, which waits for all loads before it.
        return sums, factors if packing.groups == 1 else factors_of(turn + 1)

    zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), WGMMA)
    carry = [zeros] * count, factors_of(jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), jnp.int32(block.turns), process_turn, carry)[0]
