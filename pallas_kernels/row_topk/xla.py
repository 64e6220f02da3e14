"""`row_topk` in plain XLA."""

import jax
from jaxtyping import Array, Float32, Int32


def row_topk(
    scores: Float32[Array, "rows columns"], *, count: int, softmax: bool
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Implements `api.row_topk`."""
    values, positions = jax.lax.top_k(scores, count)
    return jax.nn.softmax(values) if softmax else values, positions
