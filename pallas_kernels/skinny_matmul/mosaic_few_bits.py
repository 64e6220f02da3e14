"""The `skinny_matmul` kernel's loop over weights in 8 and 4 bits, which it widens in registers.

The sums of each group of columns, or of `SPAN` columns of a longer one, are scaled in float32 and added. Scales of the
next turn are loaded during a turn.
"""

from math import gcd

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.mosaic.few_bits import load_scales, load_zeros, start_product
from pallas_kernels.mosaic.products import wait_for
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns
from pallas_kernels.skinny_matmul.mosaic_block import Block

# Most rows of x, with folds, for which the registers hold two products at once.
_FEW = 32

Factors = tuple[Array, ...]
"""The scales of 64 rows, and their zero points if there are any."""


def multiply_few_bits(block: Block, tile: Array, *, interpret: bool) -> list[Array]:
    """Returns the sums of a tile, rows of the weight x rows of x, one array per 64 rows of the weight."""
    s, g, refs, packing = block.schedule, block.geometry, block.refs, block.geometry.packing
    assert packing is not None
    width, chunk = s.width(g), s.chunk(g)
    span = gcd(packing.span, chunk)
    count, spans = s.height(g) // WGMMA_ROWS, chunk // span
    loads = 1 if packing.group % chunk == 0 or packing.groups == 1 else spans
    rows, folds = zip(*(_places(block, tile, index) for index in range(count)), strict=True)

    def factors_of(turn: Array) -> list[list[Factors]]:
        """Returns the factors of a turn, by 64 rows of the weight and by group."""
        begin = (block.share * block.turns + turn) * s.folds
        return [
            [
                _factors(
                    block, rows[index], (begin + folds[index]) * chunk + load * span, interpret
                )
                for load in range(loads)
            ]
            for index in range(count)
        ]

    def process_turn(
        turn: Array, carry: tuple[list[Array], list[list[Factors]]]
    ) -> tuple[list[Array], list[list[Factors]]]:
        sums, factors = list(carry[0]), carry[1]
        following = factors_of(turn + 1)
        step = tile * block.turns + turn
        slot = block.arrive(step)
        x = refs["inputs"].at[slot]

        def begin(index: int, place: int) -> Array:
            codes = refs["weights"].at[slot, pl.ds(WGMMA_ROWS * index, WGMMA_ROWS)]
            zeros = factors[index][place % loads][1:]
            return start_product(
                codes,
                x,
                zeros[0] if zeros else None,
                code=packing.code,
                first=place * span,
                columns=span,
                interpret=interpret,
            )

        places = [(index, place) for place in range(spans) for index in range(count)]
        # Products of few rows are in flight while the next one's codes are widened.
        ahead = int(width <= _FEW)
        started = [begin(*place) for place in places[:ahead]]
        for number, (index, place) in enumerate(places):
            started += [begin(*after) for after in places[number + ahead : number + ahead + 1]]
            pending = len(started) - 1
            (found,) = wait_for(started.pop(0), interpret=interpret, pending=pending)
            scales = factors[index][place % loads][0]
            sums[index] += found * over_columns(scales, width)
        block.refill(step)
        return sums, following

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


def _factors(block: Block, rows: Array, columns: Array, interpret: bool) -> Factors:
    """Returns the factors of these columns, and past the end those of the last group."""
    packing, refs = block.geometry.packing, block.refs
    assert packing is not None
    groups = jnp.minimum(lax.div(columns, jnp.int32(packing.group)), packing.groups - 1)
    scales = load_scales(refs["scales"], rows, groups, interpret=interpret)
    if not packing.has_zeros:
        return (scales,)
    return scales, load_zeros(refs["zeros"], rows, groups, interpret=interpret)
