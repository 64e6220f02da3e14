"""Log-probabilities of given tokens: one step over whole texts, without sampling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxkv.batch import StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.log_total import log_total
from pallas_kernels.fixed_order import fixed_order

_BLOCK = 256
"""Tokens per block of logits: 256 rows of a 128k vocabulary take 131 MB in float32."""


class TokenScores(NamedTuple):
    """Natural log-probabilities at each packed token, of tokens that may come after it.

    Attributes:
        following: log-probability of the packed token after it; invalid at a row's last token, because the token after
            it belongs to the next row.
        top_ids: the most likely tokens, in descending order.
        top: their log-probabilities.
    """

    following: Float32[Array, " tokens"]
    top_ids: Int32[Array, "tokens top"]
    top: Float32[Array, "tokens top"]


def score_tokens(
    model: Model, params: Params, cache: Cache, batch: StepBatch, top: int
) -> tuple[Cache, TokenScores]:
    """Returns the cache after one step over texts, and the scores of their tokens.

    The caller donates `cache` when it compiles this function.

    Args:
        model: the model; static.
        params: its parameters.
        cache: the cache before the step.
        batch: the step's metadata.
        top: number of most likely tokens to report; static.
    """
    cache, hidden = model.forward(params, cache, batch)
    following = jnp.roll(batch.tokens, -1)
    count = hidden.shape[0]
    blocks = -(-count // _BLOCK)
    hidden = jnp.pad(hidden, ((0, blocks * _BLOCK - count), (0, 0)))
    following = jnp.pad(following, (0, blocks * _BLOCK - count))

    def score_block(block: tuple[Array, Array]) -> TokenScores:
        logits = model.logits(params, block[0])
        chosen = jnp.take_along_axis(logits, block[1][:, None], axis=1)[:, 0]
        with fixed_order(model.batch_invariant):
            total = log_total(logits)
        values, ids = jax.lax.top_k(logits, top)
        return TokenScores(chosen - total[:, 0], ids, values - total)

    scores = jax.lax.map(
        score_block,
        (hidden.reshape(blocks, _BLOCK, -1), following.reshape(blocks, _BLOCK)),
    )
    return cache, jax.tree.map(
        lambda each: each.reshape(blocks * _BLOCK, *each.shape[2:])[:count], scores
    )
