"""Replays of rollouts on our kernels in bfloat16: not one bit differs from what the decode steps reported."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder

pytestmark = pytest.mark.gpu

MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=512,
        num_layers=3,
        heads=8,
        kv_heads=4,
        head_dim=64,
        ffn_size=1024,
        max_positions=512,
        rope=RopeConfig(rotary_dim=64),
        windows=(None, 48, None),
    )
)
HEAD = list(range(100, 164))
PROMPTS = [[1, 2, 3], [*HEAD, 4, 5], [7] * 100, [*HEAD, 9]]
SAMPLING = SamplingParams(
    n=4, temperature=0.9, top_k=100, max_tokens=24, seed=1, logprobs=0, logprobs_mode="truncated"
)


@pytest.fixture(scope="module")
def params():
    drawn = MODEL.init_params(jax.random.key(1), jnp.bfloat16)
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, drawn)


def assert_same_bits(llm, rollout):
    scores = llm.score(PROMPTS, rollout, SAMPLING)
    for told, logprobs, mask in zip(scores, rollout.logprobs, rollout.output_mask, strict=True):
        np.testing.assert_array_equal(told, logprobs[mask])


@pytest.mark.parametrize("pinned", [False, True])
def test_the_engines_rollouts_are_replayed_bit_for_bit(params, pinned):
    llm = LLM.from_parts(
        MODEL,
        params,
        cache=CacheConfig(max_sequences=8, page_size=16),
        engine=EngineConfig(token_budget=64, pinned_shapes=pinned),
        max_model_len=256,
        progress=False,
    )
    assert llm.stats().implementation == "mosaic_gpu"
    llm.rollout(PROMPTS, SAMPLING)
    llm.update_weights(params)
    rollouts = [llm.rollout(PROMPTS, replace(SAMPLING, seed=2))]
    # With cached prefixes, only an engine of one program has the same shapes again.
    rollouts += [llm.rollout(PROMPTS, replace(SAMPLING, seed=3))] * pinned
    assert sum(one.usage.cached_tokens for one in rollouts[-1].outputs) > 0
    for rollout in rollouts:
        assert_same_bits(llm, rollout)


def test_the_program_of_generate_is_replayed_bit_for_bit(params):
    prompts = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    given = {"sampling": SAMPLING, "prompt_lens": jnp.asarray([4, 2])}
    plain = {**given, "sampling": replace(SAMPLING, seed=None)}
    out = jaxkv.generate(params, MODEL, prompts, key=jax.random.key(0), **plain)
    told = jaxkv.score(params, MODEL, prompts, out.tokens, output_lens=out.lengths, **given)
    np.testing.assert_array_equal(told, out.logprobs)
