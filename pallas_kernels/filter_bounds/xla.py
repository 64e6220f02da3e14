"""`filter_bounds` in plain XLA: one sort and one cumulative sum serve all filters."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from pallas_kernels.filter_bounds.near_best import near_best


def filter_bounds(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Returns the bounds as `api.filter_bounds` says."""
    vocab = logits.shape[1]
    # A stable sort would carry the ids along for nothing.
    ascending = lax.sort(logits, dimension=1, is_stable=False)
    best = ascending[:, -1:]
    has_k = (top_k > 0) & (top_k < vocab)
    smallest = jnp.where(has_k, vocab - top_k, 0)[:, None]
    kth = jnp.take_along_axis(ascending, smallest, axis=1)
    kth = jnp.where(has_k[:, None], kth, -jnp.inf)
    divisor, wanted = temperature[:, None], top_p[:, None]
    weights = jnp.where(ascending >= kth, jnp.exp((ascending - best) / divisor), 0.0)
    # Summed from the least likely up, so that small weights are not lost in large sums.
    mass = jnp.cumsum(weights, axis=1)
    # A token belongs to the set if those before it fall short of p, that is if the mass up to and including it
    # from below exceeds the rest. The best token always belongs, whatever the rounding.
    kept = mass > (1.0 - wanted) * mass[:, -1:]
    nucleus = jnp.min(jnp.where(kept, ascending, best), axis=1)
    nucleus = jnp.where(top_p < 1.0, nucleus, -jnp.inf)
    bound = jnp.maximum(kth[:, 0], nucleus)
    return jnp.maximum(bound, near_best(best[:, 0], min_p, temperature))
