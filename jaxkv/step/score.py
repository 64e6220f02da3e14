"""Log-probabilities of given tokens: one step over whole texts, without sampling."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params

_BLOCK = 256
"""Tokens per block of logits: 256 rows of a 128k vocabulary take 131 MB in float32."""


def score_tokens(
    model: Model, params: Params, cache: Cache, batch: StepBatch
) -> tuple[Cache, Float[Array, " tokens"]]:
    """Returns the cache, and at each packed token the natural log-probability of the packed token after it.

    The entry at a row's last token is invalid, because the token after it belongs to the next row. The caller donates
    `cache` when it compiles this function.
    """
    cache, hidden = model.forward(params, cache, batch)
    following = jnp.roll(batch.tokens, -1)
    count = hidden.shape[0]
    blocks = -(-count // _BLOCK)
    hidden = jnp.pad(hidden, ((0, blocks * _BLOCK - count), (0, 0)))
    following = jnp.pad(following, (0, blocks * _BLOCK - count))

    def score_block(block: tuple[Array, Array]) -> Array:
        logits = model.logits(params, block[0])
        chosen = jnp.take_along_axis(logits, block[1][:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=1)

    scores = jax.lax.map(
        score_block,
        (hidden.reshape(blocks, _BLOCK, -1), following.reshape(blocks, _BLOCK)),
    )
    return cache, scores.reshape(-1)[:count]
