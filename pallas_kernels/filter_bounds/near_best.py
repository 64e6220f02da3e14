"""The threshold of min-p, which needs no search."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def near_best(
    best: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Returns the logit of a token `min_p` times as likely as the best one; `-inf` where min_p is 0."""
    return best + temperature * jnp.log(min_p)
