"""Products with weights in 8 or 4 bits in plain XLA, which widens a few of their rows at a time."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.fixed_order import by_row_tiles
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.quantise import largest_of, scales_of, stored

MOST_WIDENED = 2**22
"""Most numbers of a weight that are widened at once: 8 MB in 16 bits."""

# Rows of a weight in one tile of a library product; parts of such tiles would take as long as whole ones.
_TILE = 128


def product(
    weight: FewBits,
    x: Float[Array, "rows inner"],
    *,
    result: DTypeLike = jnp.float32,
    most_widened: int = MOST_WIDENED,
) -> Float[Array, "rows out"]:
    """Returns `x @ weight.T`, summed in float32, whose columns of x are already in the weight's `order`.

    With one scale per row the sums are those of the exact codes, and are scaled in float32. With several the widened
    weight is rounded to x's dtype. float32 rows are multiplied at the highest precision.

    Args:
        weight: [out, inner].
        x: rows of any floating dtype.
        result: dtype of the result, to which sums are rounded as they are made.
        most_widened: most numbers of the weight that are widened at once.
    """
    out, inner = weight.shape
    height = max(1, most_widened // max(1, inner))
    if height >= out:
        return _whole(weight, x).astype(result)
    height = height // _TILE * _TILE or height

    def body(tile: Int[Array, ""], total: Float[Array, "rows out"]) -> Float[Array, "rows out"]:
        # The last tile is shifted so that it is whole; the rows that it shares with its neighbour get equal bits.
        start = jnp.minimum(tile * height, out - height)
        found = _whole(weight.rows(start, height), x)
        return lax.dynamic_update_slice_in_dim(total, found.astype(result), start, axis=1)

    # Every element is replaced. Zeros depend on nothing, so XLA would make those of all of a model's products at once.
    total = jnp.broadcast_to(x[:, :1].astype(result), (x.shape[0], out))
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-out // height)), body, total)


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


def _whole(weight: FewBits, x: Float[Array, "rows inner"]) -> Float[Array, "rows out"]:
    """Returns the product with a weight that is widened whole."""
    by_row = weight.scales.shape[-1] == 1
    wide = weight.numbers().astype(x.dtype) if by_row else weight.widened(x.dtype)
    multiply = partial(_multiply, wide)
    total = by_row_tiles(multiply, x)
    return total * weight.scales.astype(jnp.float32).T if by_row else total


def _multiply(
    wide: Float[Array, "out inner"], x: Float[Array, "rows inner"]
) -> Float[Array, "rows out"]:
    return lax.dot_general(
        x,
        wide,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
