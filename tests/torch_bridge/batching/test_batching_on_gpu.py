"""`torch_bridge.generate` on a GPU: replayed steps, packed prompts on our kernels, and JAX and torch in turn."""

import jax.numpy as jnp
import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import torch_bridge
from jaxkv import SamplingParams
from tests.torch_bridge.graphs.test_graphs_on_gpu import model_of
from tests.torch_bridge.tiny import check, greedy
from torch_bridge import JaxkvCache

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
TIE = 0.3
"""Log-probabilities of bfloat16 logits that differ by less may change places in another batch."""


@pytest.fixture(scope="module")
def model():
    return model_of()


def texts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]


def agreed(model, prompts, outputs, count):
    """Returns how many tokens are those of stock generate, each text up to its first tie; asserts that it is one."""
    same = 0
    for prompt, one in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        wanted = greedy(model, ids, torch.ones_like(ids), count, past_key_values=JaxkvCache(model))
        for at, (token, other) in enumerate(
            zip(one.token_ids, wanted[0, len(prompt) :].tolist(), strict=True)
        ):
            if token != other:
                first, second = sorted(one.outputs[0].logprobs[at].values(), reverse=True)[:2]
                assert first - second < TIE
                break
            same += 1
    return same


def test_tokens_are_those_of_the_models_own_generate_up_to_ties(model):
    prompts = texts(5, 70, 1, 33, 200, 17, 40)
    cache = JaxkvCache(model, max_tokens=2048, graphs=True)
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    out = torch_bridge.generate(
        model, prompts, params, cache=cache, max_sequences=4, token_budget=128
    )
    stats = cache.stats()
    assert stats.why_not_replayed is None
    assert stats.steps_replayed > 24
    same = agreed(model, prompts, out, 24)
    assert same > 24 * len(prompts) / 2
    check(cache)


def test_the_same_batch_gives_the_same_tokens_each_time_while_jax_works_in_between(model):
    prompts = texts(9, 50, 130)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=2, presence_penalty=0.5)
    said = []
    for _ in range(4):
        cache = JaxkvCache(model, max_tokens=2048, graphs=True)
        busy = jnp.ones((2048, 2048)) @ jnp.ones((2048, 2048))
        out = torch_bridge.generate(model, prompts, params, cache=cache, max_sequences=8)
        del busy
        said.append([one.token_ids for output in out for one in output.outputs])
        check(cache)
    assert said[1:] == said[:1] * 3
    assert len({tuple(one) for one in said[0]}) == 6


def test_a_kept_prefix_is_found_again_and_stock_generate_finds_it_too(model):
    [prompt] = texts(100)
    cache = JaxkvCache(model, max_tokens=1024, graphs=True)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first = torch_bridge.generate(model, prompt, params, cache=cache)
    second = torch_bridge.generate(model, prompt, params, cache=cache)
    assert (first[0].usage.cached_tokens, second[0].usage.cached_tokens) == (0, 96)
    ids = torch.tensor([prompt], device="cuda")
    greedy(model, ids, torch.ones_like(ids), 2, past_key_values=cache)
    assert cache.stats().tokens_reused == 96


def test_states_of_a_hybrid_model_follow_their_rows():
    config = Qwen3NextConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1, 2],
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.set_attn_implementation("jaxkv")
    prompts = texts(20, 33, 7, 50)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    cache = JaxkvCache(model, max_tokens=1024)
    out = torch_bridge.generate(model, prompts, params, cache=cache, max_sequences=2)
    assert agreed(model, prompts, out, 12) > 12 * len(prompts) / 2
    check(cache)
