"""The `skinny_matmul` kernel's loop over weights in 8 and 4 bits, which it widens in registers.

wgmma multiplies them, or each warp with `mma.sync` (`Schedule.by_warp`). Scales of the next turn are loaded at the end
of a turn, and a scale for a whole row before the first one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.mosaic.few_bits_by_warp import add_warp_products, load_factors
from pallas_kernels.mosaic.few_bits_turn import add_products, turn_factors
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA
from pallas_kernels.skinny_matmul.mosaic_block import Block

# Most rows of x, with folds, for which the registers hold two products at once.
_FEW = 32


def multiply_few_bits(block: Block, tile: Array, *, interpret: bool) -> list[Array]:
    """Returns the sums of a tile, rows of the weight x rows of x, one array per 64 rows of the weight."""
    s, g, refs, packing = block.schedule, block.geometry, block.refs, block.geometry.packing
    assert packing is not None
    width, chunk = g.padded_rows if s.by_warp else s.width(g), s.chunk(g)
    count = s.height(g) // WGMMA_ROWS
    places = [_places(block, tile, index) for index in range(count)]
    arrays = {name: refs[name] for name in packing.names}
    load_of_turn: Callable[..., list[Any]] = load_factors if s.by_warp else turn_factors
    add: Callable[..., list[Array]] = (
        partial(add_warp_products, folds=s.folds)
        if s.by_warp
        else partial(add_products, ahead=int(width <= _FEW))
    )

    def factors_of(turn: Array) -> list[list[Any]]:
        begin = (block.share * block.turns + turn) * s.folds
        return [
            load_of_turn(arrays, rows, (begin + fold) * chunk, chunk, packing, interpret=interpret)
            for rows, fold in places
        ]

    def process_turn(
        turn: Array, carry: tuple[list[Array], list[list[Any]]]
    ) -> tuple[list[Array], list[list[Any]]]:
        sums, factors = carry
        step = tile * block.turns + turn
        slot = block.arrive(step)
        codes, x = refs["weights"].at[block.stage(slot)], refs["inputs"].at[slot]
        sums = add(sums, codes, x, factors, packing, interpret=interpret)
        block.refill(step)
        # Behind the fence of `refill`, which waits for all loads before it.
        return sums, factors if packing.groups == 1 else factors_of(turn + 1)

    zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), WGMMA)
    carry = [zeros] * count, factors_of(jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), jnp.int32(block.turns), process_turn, carry)[0]


def _places(block: Block, tile: Array, index: int) -> tuple[Array, Array]:
    """Returns the row of the weight, and the fold, of each of 64 rows of a stage."""
    s, g = block.schedule, block.geometry
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=PER_ROW) + index * WGMMA_ROWS
    # Powers of two.
    part = lax.shift_right_logical(row, jnp.int32(s.columns.bit_length() - 1))
    fold = lax.shift_right_logical(part, jnp.int32(g.parts - 1))
    column = block.first_column(tile) + (row & (s.columns - 1))
    return column + (part & (g.parts - 1)) * g.out, fold
