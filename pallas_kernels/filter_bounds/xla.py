"""`filter_bounds` in plain XLA: one sort and one cumulative sum serve all filters."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from pallas_kernels.filter_bounds.near_best import near_best
from pallas_kernels.fixed_order import by_row_tiles


def filter_bounds(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Implements `api.filter_bounds`."""
    return by_row_tiles(_bounds, logits, top_k, top_p, min_p, temperature)


def _bounds(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    vocab = logits.shape[1]
    # A stable sort would also carry the ids, which are not needed.
    ascending = lax.sort(logits, dimension=1, is_stable=False)
    best = ascending[:, -1:]
    has_k = (top_k > 0) & (top_k < vocab)
    smallest = jnp.where(has_k, vocab - top_k, 0)[:, None]
    kth = jnp.take_along_axis(ascending, smallest, axis=1)
    kth = jnp.where(has_k[:, None], kth, -jnp.inf)
    divisor, wanted = temperature[:, None], top_p[:, None]
    weights = jnp.where(ascending >= kth, jnp.exp((ascending - best) / divisor), 0.0)
    # Sum from the least likely token up, so that small weights are not lost in large sums.
    mass = jnp.cumsum(weights, axis=1)
    # A token is in the nucleus if the more likely tokens have less than p, that is if the mass of this and all less
    # likely tokens exceeds 1 - p. The best token is always kept, despite rounding.
    kept = mass > (1.0 - wanted) * mass[:, -1:]
    nucleus = jnp.min(jnp.where(kept, ascending, best), axis=1)
    nucleus = jnp.where(top_p < 1.0, nucleus, -jnp.inf)
    bound = jnp.maximum(kth[:, 0], nucleus)
    return jnp.maximum(bound, near_best(best[:, 0], min_p, temperature))
