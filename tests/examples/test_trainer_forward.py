"""A trainer's own forward pass, differentiated, against the log-probabilities that the engine reports of its samples.

The trainer calls the flax.nnx example with plain causal attention over whole texts, without a cache.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.examples.flax_nnx_model import Transformer

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [7]]
SAMPLING = SamplingParams(temperature=1.0, n=4, max_tokens=24, seed=5)
MOST = {"float32": 1e-5, "bfloat16": 0.01}
"""Root mean square of the difference in nats per token that is allowed."""


def module_of(dtype):
    module = Transformer(nnx.Rngs(0))
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(module, nnx.Param))
    nnx.update(module, state)
    return module


def plain_attention(texts, tokens):
    """Returns an `attend` over `texts` packed texts of `tokens` tokens each."""

    def attend(layer, q, k, v, *, scale, window=None):
        q, k, v = (one.reshape(texts, tokens, *one.shape[1:]) for one in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)
        return mixed.reshape(texts * tokens, *mixed.shape[2:])

    return attend


def trained_logprobs(module, rollout):
    """Returns the log-probability of each output token of left-aligned texts, [samples, output_width]."""
    ids = np.concatenate([rollout.prompt_ids, rollout.output_ids], axis=1)
    lens = rollout.prompt_mask.sum(axis=1)
    start = rollout.prompt_ids.shape[1] - lens
    ids = np.stack([np.roll(row, -at) for row, at in zip(ids, start, strict=True)])
    texts, width = ids.shape
    positions = jnp.tile(jnp.arange(width), texts)
    hidden = module(jnp.asarray(ids.ravel()), positions, plain_attention(texts, width))
    told = jax.nn.log_softmax(module.logits(hidden).reshape(texts, width, -1))
    after = jnp.asarray(lens[:, None] + np.arange(rollout.output_ids.shape[1])[None, :])
    told = jnp.take_along_axis(told, after[:, :, None] - 1, axis=1)
    return jnp.take_along_axis(told, jnp.asarray(rollout.output_ids)[:, :, None], axis=2)[:, :, 0]


# tests/examples/test_grpo.py compares a trainer's log-probabilities with those of rollouts, and tests/test_scoring.py
# bits.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainers_forward_pass_has_the_log_probabilities_of_the_rollout(dtype):
    # Layers of flax promote bfloat16 to float32 in places.
    with jax.numpy_dtype_promotion("strict" if dtype == "float32" else "standard"):
        check(dtype)


def check(dtype):
    module = module_of(dtype)
    model = jaxkv.FlaxModel(module)
    params = model.params_of(module)
    llm = LLM.from_parts(
        model,
        params,
        cache=CacheConfig(max_sequences=12, page_size=16),
        engine=EngineConfig(pinned_shapes=True, token_budget=16),
        max_model_len=64,
        progress=False,
    )
    rollout = llm.rollout(PROMPTS, SAMPLING)
    advantages = jnp.asarray(np.random.default_rng(0).normal(size=(12, 1)), jnp.float32)

    def loss(module):
        told = trained_logprobs(module, rollout)
        ratio = jnp.exp(told - rollout.logprobs)
        return -jnp.mean(ratio * advantages), told

    (_, told), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(module)
    rms = float(np.sqrt(np.mean((np.asarray(told) - rollout.logprobs) ** 2)))
    print(f"RMS of trainer less rollout, {dtype}: {rms:.3g} nats")
    assert 0 < rms <= MOST[dtype]
    leaves = jax.tree.leaves(gradients)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert sum(float(jnp.abs(leaf).sum()) for leaf in leaves) > 0
    # The same tokens through decode steps have no difference at all.
    for scores, logprobs in zip(
        llm.score(PROMPTS, rollout, SAMPLING), rollout.logprobs, strict=True
    ):
        np.testing.assert_array_equal(scores, logprobs)
