"""A hybrid model: states of gated delta layers in the pool beside the pages of attention, forks included."""

import pytest
import torch
import transformers

from jaxkv.errors import OutOfStates
from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.tiny import greedy, prompts
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1, 2],
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.15,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("pads", [pytest.param((), marks=pytest.mark.slow), (4, 0)])
def test_tokens_are_those_of_transformers_own_cache(model, pads):
    ids, mask = prompts(2, 21, pads)
    wanted = greedy(model, ids, mask, 14)
    cache = JaxkvCache(model, max_tokens=256)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, mask, 14, past_key_values=cache), wanted)
        cache.reset(keep_prefix=True)
    assert len(wanted[:, 21:].unique()) > 5
    cache._store.allocator.check()
    # A recurrent layer has no state for the middle of a text, so its prefixes are computed again.
    assert cache.stats().tokens_reused == 0


def test_attention_may_read_pages_while_states_are_bound(model):
    ids, mask = prompts(2, 21, (4, 0))
    wanted = greedy(model, ids, mask, 8)
    model.set_attn_implementation("jaxkv")
    try:
        got = greedy(model, ids, mask, 8, past_key_values=JaxkvCache(model, max_tokens=256))
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(got, wanted)


def test_beams_and_forks_have_states_of_their_own(model):
    ids, mask = prompts(2, 13)
    cache = JaxkvCache(model, max_tokens=512)
    wanted = greedy(model, ids, mask, 8, num_beams=3)
    assert torch.equal(greedy(model, ids, mask, 8, num_beams=3, past_key_values=cache), wanted)
    cache.reset()
    said = greedy(model, ids, mask, 4, past_key_values=cache)
    for seed, holder in enumerate((cache, cache.fork(), cache.fork())):
        more, _ = prompts(2, 1, seed=seed + 5)
        longer = torch.cat([said, more], 1)
        shown = torch.ones_like(longer)
        wanted = greedy(model, longer, shown, 5)
        assert torch.equal(greedy(model, longer, shown, 5, past_key_values=holder), wanted)
    cache._store.allocator.check()


def test_too_many_rows_for_the_states_are_refused(model):
    cache = JaxkvCache(model, max_tokens=512, max_sequences=1)
    ids, mask = prompts(3, 5)
    with pytest.raises(OutOfStates, match=r"give JaxkvCache a larger max_sequences$"):
        greedy(model, ids, mask, 2, past_key_values=cache)
    cache._store.allocator.check()


def test_recurrent_layers_of_other_kinds_are_refused():
    config = transformers.Zamba2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        n_mamba_heads=4,
        mamba_d_state=8,
        layers_block_type=["mamba"],
    )
    with pytest.raises(Unsupported, match="layer 0 of Zamba2Config has recurrent states"):
        JaxkvCache(transformers.Zamba2ForCausalLM(config))
