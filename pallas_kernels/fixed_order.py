"""The fixed order of sums: while it is on, a row's bits depend on that row alone, not on the sizes of the call.

Libraries choose the order of a sum by the sizes of a call: a product of one row and one of 64 rows may differ in the
last bit. Under the fixed order each op has one rule for every number of rows, tokens and keys. The rules are with the
ops; this file has the switch that they read, and what the "xla" implementations share.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree, Shaped

# Part of the keys of JAX's caches of traces, so that a cached trace of the other order is never used.
_IS_FIXED = jax.make_user_context(False)

ROWS = 16
"""Rows of one product in XLA. A product of this shape is the same code in every program."""

KEYS = 64
"""Keys of one block of attention in XLA; blocks begin at multiples of it."""


def fixed_order(on: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which ops are traced with sums in a fixed order, or with `on=False` in any order."""
    return _IS_FIXED(on)


def is_fixed() -> bool:
    """Returns whether ops that are traced now must sum in a fixed order."""
    return bool(_IS_FIXED.value)


def by_row_tiles[Result: PyTree](
    function: Callable[..., Result], *arrays: Shaped[Array, "rows ..."]
) -> Result:
    """Returns `function(*arrays)`; under the fixed order it is computed `ROWS` rows at a time.

    Args:
        function: a function of arrays with equally many rows, which computes each row separately.
        arrays: its arguments.

    Returns:
        The function's result, arrays with as many rows.
    """
    rows = arrays[0].shape[0]
    if not is_fixed() or not rows:
        return function(*arrays)
    tiles = -(-rows // ROWS)

    def cut(array: Array) -> Array:
        padding = ((0, tiles * ROWS - rows),) + ((0, 0),) * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(tiles, ROWS, *array.shape[1:])

    out = lax.map(lambda parts: function(*parts), tuple(cut(array) for array in arrays))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:rows], out)


def sum_of_last(x: Float[Array, "*rows width"]) -> Float[Array, "*rows 1"]:
    """Returns the sums along the last axis, which is kept; under the fixed order halves are added to each other.

    Additions of arrays have the same order on every device and at every size, which reductions have not.
    """
    if not is_fixed():
        return jnp.sum(x, axis=-1, keepdims=True)
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = folded if width % 2 == 0 else jnp.concatenate((folded, x[..., -1:]), axis=-1)
    return x
