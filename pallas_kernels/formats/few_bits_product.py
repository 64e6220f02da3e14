"""Products with weights in 8 or 4 bits in plain XLA, which widens them a few rows at a time, or whole for many rows."""

import math
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.fixed_order import by_row_tiles, is_fixed
from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.formats.quantise import largest_of, scales_of, stored

MOST_WIDENED = 2**22
"""Most numbers of a weight that are widened at once for a few rows of x: 8 MB in 16 bits."""

_MOST_WHOLE_BYTES = 2**29
_FEWEST_ROWS = {8: 512, 4: 4096}
"""Bits of codes -> fewest rows of x for which a library's product with the widened weight is the fastest on an H200."""

# Rows of a weight in one tile of a library product; parts of such tiles would take as long as whole ones.
_TILE = 128


def product(
    weight: FewBits,
    x: Float[Array, "rows inner"],
    *,
    result: DTypeLike = jnp.float32,
    most_widened: int | None = None,
) -> Float[Array, "rows out"]:
    """Returns `x @ weight.T`, summed in float32, whose columns of x are already in the weight's `order`.

    With one scale per row the sums are those of the exact codes, and are scaled in float32. With several the widened
    weight is rounded to x's dtype. float32 rows are multiplied at the highest precision.

    Args:
        weight: [out, inner].
        x: rows of any floating dtype.
        result: dtype of the result, to which sums are rounded as they are made.
        most_widened: most numbers of the weight that are widened at once; `None` for all if `widens_whole`, and else
            `MOST_WIDENED`.
    """
    out, inner = weight.shape
    is_whole = most_widened is None and widens_whole(weight, x)
    most_widened = MOST_WIDENED if most_widened is None else most_widened
    height = max(1, most_widened // max(1, inner))
    if is_whole or height >= out:
        # The weight depends on nothing, so XLA could widen those of all of a model's products at once.
        weight, x = lax.optimization_barrier((weight, x))
        return _whole(weight, x, result)
    height = height // _TILE * _TILE or height

    def body(tile: Int[Array, ""], total: Float[Array, "rows out"]) -> Float[Array, "rows out"]:
        # The last tile is shifted so that it is whole; the rows that it shares with its neighbour get equal bits.
        start = jnp.minimum(tile * height, out - height)
        found = _whole(weight.rows(start, height), x, result)
        return lax.dynamic_update_slice_in_dim(total, found, start, axis=1)

    # Every element is replaced. Zeros depend on nothing, so XLA would make those of all of a model's products at once.
    total = jnp.broadcast_to(x[:, :1].astype(result), (x.shape[0], out))
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-out // height)), body, total)


def widens_whole(weight: FewBits, x: Float[Array, "rows inner"]) -> bool:
    """Returns whether a weight is widened at once: if groups of its columns have scales and x has many rows.

    Widening it takes the time of reading and writing memory, and the product afterwards that of a plain weight. Our
    kernel widens in registers what each of its tiles needs, which takes longer if there are many of them. With one
    scale per row it is about as fast.
    """
    wide_bytes = math.prod(weight.shape) * x.dtype.itemsize
    are_many = len(x) >= _FEWEST_ROWS[CODES[weight.code].bits]
    in_groups = weight.scales.shape[-1] > 1
    return are_many and in_groups and wide_bytes <= _MOST_WHOLE_BYTES and not is_fixed()


def ordered(
    x: Shaped[Array, "rows inner"], order: Int[Array, " inner"] | None
) -> Shaped[Array, "rows inner"]:
    """Returns the columns of x in the order of a weight's columns."""
    return x if order is None else jnp.take(x, order, axis=1, mode="clip")


def rounded_rows(
    x: Float[Array, "rows inner"],
) -> tuple[Float[Array, "rows inner"], Float[Array, " rows"]]:
    """Returns the rows in float8_e4m3fn and their float32 scales; the largest of a row becomes 448.

    A row that holds NaN or infinity gets a NaN scale.
    """
    wide = x.astype(jnp.float32)
    scales = scales_of(largest_of(wide), jnp.float8_e4m3fn)
    return stored(wide, scales[:, None], jnp.float8_e4m3fn), scales


def _whole(
    weight: FewBits, x: Float[Array, "rows inner"], result: DTypeLike
) -> Float[Array, "rows out"]:
    """Returns the product with a weight that is widened whole, rounded to `result`."""
    if weight.scales.shape[-1] > 1:
        return by_row_tiles(partial(_multiply, weight.widened(x.dtype), result), x)
    codes = weight.numbers().astype(x.dtype)
    total = by_row_tiles(partial(_multiply, codes, jnp.float32), x)
    return (total * weight.scales.astype(jnp.float32).T).astype(result)


def _multiply(
    wide: Float[Array, "out inner"], result: DTypeLike, x: Float[Array, "rows inner"]
) -> Float[Array, "rows out"]:
    return lax.dot_general(
        x,
        wide,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=result,
    )
