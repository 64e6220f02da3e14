"""The logarithm of the sum of exponentials of logits, which turns logits into log-probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.fixed_order import is_fixed, sum_of_last


def log_total(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows 1"]:
    """Returns the natural logarithm of each row's sum of exponentials; -inf for a row of -inf."""
    if not is_fixed():
        return jax.nn.logsumexp(logits, axis=1, keepdims=True)
    best = jnp.max(logits, axis=1, keepdims=True)
    # -inf - -inf would be NaN.
    best = jnp.where(jnp.isfinite(best), best, 0.0)
    return best + jnp.log(sum_of_last(jnp.exp(logits - best)))
