"""Attention "jaxkv" reads the pages: tokens and logits of Transformers, and errors where it is not supported."""

import pytest
import torch
import transformers

from tests.torch_bridge.tiny import greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.ops import calls
from torch_bridge.transformers_cache.step import Step

pytestmark = pytest.mark.torch


@pytest.fixture
def ours(monkeypatch):
    """Makes models whose attention is ours, and fails if anything is gathered for them."""
    made = []

    def refuse(self, layer):
        raise AssertionError(f"layer {layer} was gathered")

    def choose(family):
        model = tiny_model(family)
        model.set_attn_implementation("jaxkv")
        monkeypatch.setattr(Step, "gather", refuse)
        made.append(model)
        return model

    return choose


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_and_logits_are_those_of_transformers(family, ours):
    ids, mask = prompts(3, 21, (5, 0, 17))
    options = {"output_logits": True, "return_dict_in_generate": True}
    wanted = greedy(tiny_model(family), ids, mask, 12, **options)
    model = ours(family)
    cache = JaxkvCache(model, max_tokens=512)
    got = greedy(model, ids, mask, 12, past_key_values=cache, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    for logits, others in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(logits, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_counts_the_tokens_of_a_row_and_not_the_padding_between_them(family, ours):
    model = ours(family)
    ids, mask = prompts(1, 24)
    mask[0, 6:11] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    alone = ids[:, mask[0].bool()]
    with torch.no_grad():
        got = model(
            ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=JaxkvCache(model, max_tokens=64),
        ).logits[:, mask[0].bool()]
        wanted = tiny_model(family)(alone).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_prefix_reuse_beams_and_forks_work_on_pages(ours):
    plain, model = tiny_model("llama"), ours("llama")
    ids, mask = prompts(2, 37, (4, 0))
    cache = JaxkvCache(model, max_tokens=512)
    for beams in (1, 2):
        wanted = greedy(plain, ids, mask, 6, num_beams=beams)
        assert torch.equal(
            greedy(model, ids, mask, 6, num_beams=beams, past_key_values=cache), wanted
        )
        cache.reset()
    # Each prompt's second time, as two beams.
    assert cache.stats().tokens_reused == 2 * (32 + 28)
    said = greedy(model, ids, mask, 3, past_key_values=cache)
    child = cache.fork()
    more, ones = prompts(2, 5, seed=8)
    longer, shown = torch.cat([said, more], 1), torch.cat([mask, ones[:, :3], ones], 1)
    wanted = greedy(plain, longer, shown, 5)
    assert torch.equal(greedy(model, longer, shown, 5, past_key_values=child), wanted)


def test_the_kernel_is_called_for_each_layer_and_sees_torchs_writes_without_a_copy(
    ours, monkeypatch
):
    model = ours("llama")
    cache = JaxkvCache(model, max_tokens=64)
    pools = [a.unsafe_buffer_pointer() for a in cache.owner.handle().cache.arrays]
    called = []

    def run(op, q, keys, values, *rest, **options):
        called.append((op, keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer()))
        return calls.run(op, q, keys, values, *rest, **options)

    monkeypatch.setattr("torch_bridge.transformers_cache.attention.run", run)
    ids, mask = prompts(1, 5)
    greedy(model, ids, mask, 2, past_key_values=cache)
    pairs = [(pools[0], pools[1]), (pools[2], pools[3])]
    assert called == [
        (op, *pair) for op in ("ragged_attention", "paged_attention") for pair in pairs
    ]


def test_soft_caps_reach_the_kernel():
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=6, query_pre_attn_scalar=20, eos_token_id=None,
        pad_token_id=0, attn_logit_softcapping=1.5, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    ids, mask = prompts(2, 14, (3, 0))
    ids = ids.clamp(max=63)
    options = {"output_logits": True, "return_dict_in_generate": True}
    wanted = greedy(model, ids, mask, 6, **options)
    model.set_attn_implementation("jaxkv")
    got = greedy(model, ids, mask, 6, past_key_values=JaxkvCache(model), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(got.logits[-1], wanted.logits[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}])
def test_without_a_cache_of_ours_it_says_what_to_pass(ours, options):
    model = ours("llama")
    JaxkvCache(model)
    ids, mask = prompts(1, 5)
    with pytest.raises(
        ValueError, match=r"this forward has none: pass past_key_values=JaxkvCache\(model\)"
    ):
        greedy(model, ids, mask, 2, **options)


def test_layers_with_an_attention_of_their_own_are_named(ours, monkeypatch):
    model = ours("llama")
    cache = JaxkvCache(model)
    attention = model.model.layers[1].self_attn

    def attend(hidden_states, past_key_values, **more):
        keys = torch.ones(*hidden_states.shape[:2], 2, 16).transpose(1, 2)
        past_key_values.update(keys, keys, attention.layer_idx)
        return hidden_states, None

    monkeypatch.setattr(attention, "forward", attend)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"layers \[1\] have an attention of"):
        model(prompts(1, 5)[0], past_key_values=cache)


def test_layers_that_borrow_keys_are_refused_by_number():
    config = transformers.Gemma3nTextConfig(
        vocab_size=96, vocab_size_per_layer_input=96, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layer_types=["sliding_attention"] * 3, sliding_window=6, num_kv_shared_layers=1, laurel_rank=4,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    ids, mask = prompts(2, 9, (3, 0))
    wanted = greedy(model, ids, mask, 4)
    cache = JaxkvCache(model)
    assert torch.equal(greedy(model, ids, mask, 4, past_key_values=cache), wanted)
    cache.reset()
    model.set_attn_implementation("jaxkv")
    with pytest.raises(ValueError, match="layer 2 of Gemma3nTextAttention has no keys of its own"):
        greedy(model, ids, mask, 4, past_key_values=cache)


def test_masks_beyond_padding_dropout_and_other_windows_are_refused(ours):
    model = ours("llama")
    cache = JaxkvCache(model)
    ids, _ = prompts(1, 5)
    everything = torch.zeros(1, 1, 5, 5)
    with torch.no_grad(), pytest.raises(ValueError, match="2-D masks of padding alone"):
        model(ids, attention_mask=everything, past_key_values=cache)
    cache.reset()
    with torch.no_grad(), pytest.raises(ValueError, match="no position_bias"):
        model(ids, position_bias=everything, past_key_values=cache)
    cache.reset()
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(ValueError, match="has no dropout"):
        model(ids, past_key_values=cache)
    model.eval()
    cache.reset()
    other = ours("mistral")
    cache = JaxkvCache(other)
    other.config.sliding_window = 5
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="has a window of 5, but the cache was made for 7"),
    ):
        other(ids, past_key_values=cache)


def test_masks_of_other_kinds_are_refused_when_they_are_made():
    from torch_bridge.transformers_cache.attention import no_mask

    with pytest.raises(ValueError, match="needs another mask"):
        no_mask(mask_function=lambda *_: True)
    with pytest.raises(ValueError, match="needs another mask"):
        no_mask(mask_function=transformers.masking_utils.causal_mask_function, use_vmap=True)


def test_gradients_are_refused_not_wrong(ours):
    model = ours("llama")
    ids, _ = prompts(1, 6)
    loss = model(ids, past_key_values=JaxkvCache(model)).logits.sum()
    with pytest.raises(RuntimeError, match="have no gradient"):
        loss.backward()
