"""Thresholds of top-k, top-p and min-p for logits whose ids several devices divide, without putting them together.

A sort would need all ids on one device. Instead the devices search for a threshold together. Each counts, or weighs,
its own logits below fifteen candidates, one sum over the devices adds that up, and the sums decide the next four bits
of the threshold: a radix select (Knuth, The Art of Computer Programming, vol. 3) whose histograms are cumulative.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int, UInt32

_BITS = 4
"""Bits of a threshold that one exchange decides. More bits need fewer exchanges and more candidates."""


def bounds_of_parts(
    logits: Float32[Array, "rows width"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
    best: Float32[Array, "rows 1"],
    *,
    vocab_size: int,
    axis: str,
) -> Float32[Array, " rows"]:
    """Returns each row's threshold of its filters, see `pallas_kernels.filter_bounds`; all devices get the same.

    The threshold of top-k is exact. That of top-p may be another token's where a sum of probabilities equals p up to
    float32 rounding.

    Args:
        logits: this device's part of the logits. A row's result is undefined if it holds NaN or +inf, or only -inf.
        top_k: 0, or at least `vocab_size`, for no filter.
        top_p: 1 for no filter.
        min_p: 0 for no filter.
        temperature: positive; probabilities are the softmax of logits / temperature.
        best: the largest logit of each row over all devices.
        vocab_size: number of ids over all devices.
        axis: name of the mesh axis of the devices.
    """
    keys, lowest = _keys(logits), _keys(jnp.float32(-jnp.inf))
    # As many tokens are below the k-th largest logit as are not among the k likeliest.
    others = (vocab_size - top_k).astype(jnp.float32)
    kth = _largest_key(keys, jnp.ones_like(logits), others, axis)
    kth = jnp.where((top_k > 0) & (top_k < vocab_size), kth, lowest)
    weights = jnp.where(
        keys >= kth[:, None], jnp.exp((logits - best) / temperature[:, None]), jnp.float32(0)
    )
    total = lax.psum(jnp.sum(weights, axis=1), axis)
    # Weights are added from the least likely token up, so that the small ones are not lost in large sums. A token is in
    # the nucleus if the more likely tokens have less than p, that is if it and all less likely ones exceed 1 - p.
    nucleus = _largest_key(keys, weights, (1 - top_p) * total, axis)
    bound = jnp.maximum(kth, jnp.where(top_p < 1, nucleus, lowest))
    # The likeliest token is always kept. With a tiny p no weight is too much, and the search ends above all tokens.
    bound = _values(jnp.minimum(bound, _keys(best[:, 0])))
    return jnp.maximum(bound, best[:, 0] + temperature * jnp.log(min_p))


def _largest_key(
    keys: UInt32[Array, "rows width"],
    weights: Float32[Array, "rows width"],
    most: Float32[Array, " rows"],
    axis: str,
) -> UInt32[Array, " rows"]:
    """Returns the largest key for which the keys below it have at most this weight, over all devices."""
    digits = jnp.arange(1, 2**_BITS, dtype=jnp.uint32)[None]
    found = jnp.zeros(len(keys), jnp.uint32)
    for shift in range(32 - _BITS, -1, -_BITS):
        candidates = found[:, None] | digits << shift
        below = lax.psum(_weights_below(keys, weights, candidates), axis)
        # The weight grows from candidate to candidate.
        digit = jnp.sum(below <= most[:, None], axis=1, dtype=jnp.uint32)
        found = found | digit << shift
    return found


def _weights_below(
    keys: UInt32[Array, "rows width"],
    weights: Float32[Array, "rows width"],
    candidates: UInt32[Array, "rows candidates"],
) -> Float32[Array, "rows candidates"]:
    """Returns the weight of each row's keys that are below each candidate; one pass over the keys."""
    several = candidates.shape[1]
    below = [
        jnp.where(keys < candidates[:, at : at + 1], weights, jnp.float32(0))
        for at in range(several)
    ]
    zeros = [jnp.float32(0)] * several
    sums = lax.reduce(below, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
    return jnp.stack(sums, axis=1)


def _keys(values: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns integers in the order of the floats: all bits of negative ones are flipped, the sign of the others."""
    # -0.0 equals 0.0, and its bits do not.
    bits = lax.bitcast_convert_type(jnp.where(values == 0, jnp.float32(0), values), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _values(keys: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the floats of keys."""
    bits = jnp.where(keys >> 31, keys & jnp.uint32(2**31 - 1), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)
