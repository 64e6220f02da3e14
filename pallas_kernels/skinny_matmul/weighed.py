"""The result of a product that goes into an RMSNorm, and the two halves of that norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fixed_order import sum_of_last


class Weighed(NamedTuple):
    """A result with an RMSNorm applied except for the division by the root mean square, which its reader does.

    Attributes:
        result: the rows.
        weighed: the rows times the weights of the norm.
        squares: float32 sums of the rows' squares over parts of their columns.
    """

    result: Float[Array, "rows out"]
    weighed: Float[Array, "rows out"]
    squares: Float[Array, "parts rows"]


def inverse_root(
    squares: Float[Array, "parts rows"], inner: int, norm_eps: float
) -> Float[Array, "rows 1"]:
    """Returns the reciprocal root mean square of rows of `inner` elements with these sums of squares."""
    return jax.lax.rsqrt(sum_of_last(squares.T) / inner + norm_eps)


def weigh(
    rows: Float[Array, "rows out"], weights: Float[Array, " out"], *, parts: int = 1
) -> Weighed:
    """Returns the `Weighed` of rows and the weights of a norm.

    Args:
        rows: the rows.
        weights: weights of the norm.
        parts: number of equal parts of the columns that are summed separately. XLA gives each of a few long rows one
            block of threads, so their parts are summed sooner.
    """
    wide = rows.astype(jnp.float32)
    weighed = wide * weights.astype(jnp.float32)[None]
    of_parts = (wide * wide).reshape(len(rows), parts, rows.shape[1] // parts)
    squares = sum_of_last(of_parts).reshape(len(rows), parts)
    return Weighed(rows, weighed.astype(rows.dtype), squares.T)
