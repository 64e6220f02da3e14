"""Reference of `row_topk`: a stable sort of each row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def row_topk(
    scores: Float32[Array, "rows columns"], *, count: int, softmax: bool = False
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Returns the largest numbers, or their softmax, and their columns; the sort orders -0.0 and 0.0 by their bits."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    # Integers in the order of the numbers, the largest first.
    keys = ~jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
    columns = jnp.argsort(keys, axis=1, stable=True)[:, :count].astype(jnp.int32)
    taken = jnp.take_along_axis(scores, columns, axis=1)
    return jax.nn.softmax(taken) if softmax else taken, columns
