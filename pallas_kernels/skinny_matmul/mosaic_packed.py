"""The `skinny_matmul` kernel's loop over 8-bit weights, which it converts to float16 in registers.

In wgmma's left-operand fragment a thread holds pairs of adjacent elements from several places of a row, while one
16-byte load gives it 16 adjacent elements. So products contract the elements of a piece in a permuted order, the same
for weights and x.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.unpack_bytes import load_left_operand
from pallas_kernels.skinny_matmul.mosaic_block import Block
from pallas_kernels.skinny_matmul.mosaic_geometry import PIECE, PIECE_BYTES

_EXPONENT = 0x7F800000


def reordered(numbers: Float[Array, "rows inner"]) -> Float[Array, "rows inner"]:
    """Returns the elements of each piece in the order of the products.

    Element 64 * turn + 16 * warp + 8 * half + 2 * member + second of a product is element 32 * member + 16 * turn +
    4 * warp + 2 * half + second of its piece (`load_left_operand`).
    """
    rows, inner = numbers.shape
    member, turn, warp, half, second = 4, 2, 4, 2, 2
    apart = numbers.reshape(rows, inner // PIECE_BYTES, member, turn, warp, half, second)
    return apart.transpose(0, 1, 3, 4, 5, 2, 6).reshape(rows, inner)


def prepared(
    x: Float[Array, "rows inner"],
) -> tuple[Float[Array, "rows inner"], Float[Array, " rows"]]:
    """Returns float16 rows in the order of the products, and the factors of their sums.

    Each row is divided exactly by its largest magnitude rounded down to a power of two. Elements that then underflow in
    float16 are below 2**-24 of the largest.
    """
    wide = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32) & _EXPONENT
    factors = lax.bitcast_convert_type(bits, jnp.float32)
    # The inverse; finite also for zeros, infinity and NaN, which stay what they are.
    inverse = lax.bitcast_convert_type(jnp.maximum((254 << 23) - bits, 0), jnp.float32)
    return reordered(wide * inverse[:, None]).astype(jnp.float16), factors


def multiply_packed(block: Block, tile: Array, *, interpret: bool) -> list[Array]:
    """Returns the sums of a tile, rows of the weight x rows of x, one array per 64 rows of the weight."""
    s, g, refs = block.schedule, block.geometry, block.refs
    shape = (WGMMA_ROWS, s.width(g))
    count = s.height(g) // WGMMA_ROWS

    def product(packed: Ref, rows: Ref) -> Array:
        if interpret:
            weights = reordered(packed[...].astype(jnp.float32))
            return lax.dot(weights, rows[...].astype(jnp.float32))

        def multiply(sums: Ref) -> Array:
            for tall in range(s.chunk(g) // PIECE):
                plgpu.wgmma(
                    sums, load_left_operand(packed, tall), rows.at[pl.ds(PIECE * tall, PIECE)]
                )
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def process_turn(turn: Array, sums: list[Array]) -> list[Array]:
        step = tile * block.turns + turn
        slot = block.arrive(step)
        rows = refs["inputs"].at[slot].transpose((1, 0))
        tiles = [
            refs["weights"].at[slot, pl.ds(WGMMA_ROWS * index, WGMMA_ROWS)]
            for index in range(count)
        ]
        sums = [total + product(packed, rows) for total, packed in zip(sums, tiles, strict=True)]
        block.refill(step)
        return sums

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
    return lax.fori_loop(jnp.int32(0), jnp.int32(block.turns), process_turn, [zeros] * count)
