"""Reference of `filter_bounds`: a sort and cumulative sums, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int


def filter_bounds(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Returns the thresholds; sums start at the least likely token."""

    def bound(row: Array, k: Array, p: Array, share: Array, divisor: Array) -> Array:
        falling = -jnp.sort(-row)
        rank = jnp.arange(len(row))
        kth = falling[jnp.where((k > 0) & (k < len(row)), k, len(row)) - 1]
        weights = jnp.where(falling >= kth, jnp.exp((falling - falling[0]) / divisor), 0.0)
        before = jnp.sum(weights) - jnp.cumsum(weights[::-1])[::-1]
        in_nucleus = (before < p * jnp.sum(weights)) | (rank == 0)
        nucleus = jnp.min(jnp.where(in_nucleus, falling, jnp.inf))
        nucleus = jnp.where(p < 1.0, nucleus, -jnp.inf)
        return jnp.maximum(jnp.maximum(kth, nucleus), falling[0] + divisor * jnp.log(share))

    return jax.vmap(bound)(logits, top_k, top_p, min_p, temperature)
