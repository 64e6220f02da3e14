"""Prefix reuse of `JaxkvCache`: the same tokens, exact counts, and no keys of another computation."""

import numpy as np
import pytest
import torch
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    RobertaConfig,
    RobertaForCausalLM,
)

from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import (
    FAMILIES,
    VOCAB,
    check,
    greedy,
    is_marked,
    mark_last_page,
    prompts,
    tiny_model,
)
from tests.torch_bridge.tiny_recurrent import recurrent_model
from torch_bridge import JaxkvCache
from torch_bridge.transformers_cache.forward_call import ForwardCall

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


def test_a_second_prompt_that_begins_alike_is_computed_from_where_it_differs(llama):
    ids, mask = prompts(1, 50)
    cache = JaxkvCache(llama, max_tokens=256)
    greedy(llama, ids, mask, 10, past_key_values=cache)
    cache.reset(keep_prefix=True)
    other, _ = prompts(1, 50, seed=2)
    other[:, :40] = ids[:, :40]
    before = cache.stats()
    wanted = greedy(llama, other, mask, 10)
    assert torch.equal(greedy(llama, other, mask, 10, past_key_values=cache), wanted)
    after = cache.stats()
    assert after.tokens_reused - before.tokens_reused == 32
    assert after.tokens_computed - before.tokens_computed == 18 + 9
    cache.reset(keep_prefix=False)
    greedy(llama, other, mask, 2, past_key_values=cache)
    assert cache.stats().tokens_reused == after.tokens_reused
    check(cache)


def test_padding_between_tokens_leaves_no_keys_of_other_windows_behind(models):
    model = models["gemma3"]
    ids, mask = prompts(1, 40)
    mask[0, 20:26] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = JaxkvCache(model, max_tokens=256, page_size=4)
    alone = ids[:, mask[0].bool()]
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        cache.reset()
        got = model(alone, past_key_values=cache, logits_to_keep=1).logits
        wanted = model(alone, logits_to_keep=1).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    # Padding in front of a text, which its windows do not see, is no obstacle.
    cache.reset()
    padded, shown = prompts(1, 40, (6,))
    padded[:, 6:] = alone
    wanted = greedy(model, padded, shown, 6)
    assert torch.equal(greedy(model, padded, shown, 6, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 32


def test_generated_tokens_can_be_found_again_too(llama):
    ids, mask = prompts(1, 10)
    cache = JaxkvCache(llama, max_tokens=256)
    said = greedy(llama, ids, mask, 40, past_key_values=cache)
    cache.reset()
    greedy(llama, said, torch.ones_like(said), 4, past_key_values=cache)
    assert cache.stats().tokens_reused == 48
    longer = greedy(llama, said, torch.ones_like(said), 4)
    cache.reset()
    assert torch.equal(greedy(llama, said, torch.ones_like(said), 4, past_key_values=cache), longer)


@pytest.mark.parametrize("how", ["gathered", "paged", "replayed"])
def test_the_last_token_of_a_prompt_that_is_found_whole_is_written_to_copies_of_its_page(
    monkeypatch, how
):
    model = tiny_model("llama")
    ids, _ = prompts(1, 32)
    rows = ids.repeat(3, 1)
    wanted = greedy(model, rows, torch.ones_like(rows), 6)
    if how == "replayed":
        monkeypatch.setattr(
            "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
        )
    model.set_attn_implementation("sdpa" if how == "gathered" else "jaxkv")
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, torch.ones_like(ids), 1, past_key_values=cache)
    cache.reset()
    page = mark_last_page(cache, ids[0].tolist())
    for _ in range(2):
        got = greedy(model, rows, torch.ones_like(rows), 6, past_key_values=cache)
        assert torch.equal(got, wanted)
        assert is_marked(cache, page)
        cache.reset()
    stats = cache.stats()
    assert stats.tokens_reused == 2 * 3 * 31
    assert stats.steps_replayed == (2 * 6 if how == "replayed" else 0)
    check(cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_padded_differently_share_a_prefix_as_far_as_all_have_it(models, family):
    model = models[family]
    ids, mask = prompts(3, 40, (0, 6, 20))
    cache = JaxkvCache(model, max_tokens=512)
    wanted = greedy(model, ids, mask, 9)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, mask, 9, past_key_values=cache), wanted)
        cache.reset()
    assert cache.stats().tokens_reused > 0
    check(cache)


def test_prefixes_are_not_reused_where_all_logits_are_asked_for(llama):
    ids, _ = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    with torch.no_grad():
        whole = llama(ids, past_key_values=cache).logits
        cache.reset()
        again = llama(ids, past_key_values=cache).logits
        cache.reset()
        last = llama(ids, past_key_values=cache, logits_to_keep=3).logits
    assert whole.shape == again.shape == (1, 40, whole.shape[2])
    assert cache.stats().tokens_reused == 32
    torch.testing.assert_close(last, whole[:, -3:], rtol=0, atol=1e-5)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)


def test_what_was_computed_at_other_positions_is_not_found_as_a_prefix(llama):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    with torch.no_grad():
        llama(ids, past_key_values=cache, position_ids=torch.arange(5, 45)[None])
    cache.reset()
    assert torch.equal(
        greedy(llama, ids, mask, 6, past_key_values=cache), greedy(llama, ids, mask, 6)
    )
    assert cache.stats().tokens_reused == 0


@pytest.mark.parametrize("kept", [[torch.arange(40)], [None], [None, None]])
def test_bambas_positions_of_its_own_are_no_prefix(kept):
    """Without `position_ids`, Bamba begins at position 0 in each forward."""
    model = recurrent_model("Bamba")
    ids, _ = prompts(1, 46)
    cache = JaxkvCache(model, max_tokens=256, page_size=4)
    options = {"past_key_values": cache, "logits_to_keep": 1}
    with torch.no_grad():
        wanted = model(ids, logits_to_keep=1).logits
        for positions in (None, torch.arange(46)[None]):
            for chunk, given in zip(ids[:, :40].chunk(len(kept), dim=1), kept, strict=True):
                model(chunk, position_ids=given if given is None else given[None], **options)
            cache.reset()
            got = model(ids, position_ids=positions, **options).logits
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            cache.reset(keep_prefix=False)
    assert cache.stats().tokens_reused == (0 if None in kept else 40)


def test_positions_of_its_own_that_a_roberta_counts_are_no_prefix():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.15}
    config = RobertaConfig(**sizes, is_decoder=True, max_position_embeddings=128, pad_token_id=0)
    model = RobertaForCausalLM(config).eval()
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.reset()
    wanted = greedy(model, ids, mask, 6, eos_token_id=None)
    got = greedy(model, ids, mask, 6, eos_token_id=None, past_key_values=cache)
    assert torch.equal(got, wanted)
    assert cache.stats().tokens_reused == 0


def test_positions_behind_an_earlier_image_are_no_prefix():
    """Without `position_ids`, Qwen3-VL adds to the positions behind cached tokens what its last images left behind."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    turns = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen3VLConfig(
        text_config={**sizes, "rope_parameters": turns, "initializer_range": 0.15},
        vision_config={**sight, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.model.rope_deltas = torch.tensor([[9]])
    ids, _ = prompts(1, 46)
    cache = JaxkvCache(model, max_tokens=256)
    with torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache, logits_to_keep=1)
        cache.reset()
        got = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        wanted = model(input_ids=ids, logits_to_keep=1).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_embeddings_may_have_padding_in_front_of_all_rows(llama):
    ids, mask = prompts(2, 20, (3, 5))
    embeds = llama.get_input_embeddings()(ids).detach()
    options = {"inputs_embeds": embeds, "attention_mask": mask, "max_new_tokens": 5}
    wanted = llama.generate(do_sample=False, **options)
    cache = JaxkvCache(llama, max_tokens=256)
    assert torch.equal(llama.generate(do_sample=False, past_key_values=cache, **options), wanted)


def test_tokens_given_as_embeddings_are_no_prefix(llama):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    embeds = llama.get_input_embeddings()(ids).detach() * 2
    wanted = llama.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=5, do_sample=False
    )
    got = llama.generate(
        inputs_embeds=embeds,
        attention_mask=mask,
        max_new_tokens=5,
        do_sample=False,
        past_key_values=cache,
    )
    assert torch.equal(got, wanted)
    cache.reset()
    greedy(llama, ids, mask, 2, past_key_values=cache)
    assert cache.stats().tokens_reused == 0


def test_what_was_computed_under_a_mask_of_ones_own_is_no_prefix(llama):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    everything = torch.zeros(1, 1, 40, 40)
    with torch.no_grad():
        llama(ids, attention_mask=everything, past_key_values=cache)
    cache.reset()
    wanted = greedy(llama, ids, mask, 6)
    assert torch.equal(greedy(llama, ids, mask, 6, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0


def test_what_was_computed_with_an_unknown_argument_is_no_prefix():
    known = {"input_ids": torch.ones(1, 3), "attention_mask": None, "output_attentions": False}
    assert ForwardCall.of({**known, "language": None}).ids is known["input_ids"]
    for given in (torch.ones(2), [torch.ones(2)], "fr", 0.5, True):
        assert ForwardCall.of({**known, "language": given}).ids is None


def test_single_tokens_computed_under_autocast_are_no_prefix(llama):
    ids, _ = prompts(1, 24)
    cache = JaxkvCache(llama, max_tokens=256, page_size=4)
    with torch.no_grad():
        llama(ids[:, :12], past_key_values=cache)
        with torch.autocast("cpu", torch.bfloat16):
            for column in range(12, 24):
                llama(ids[:, column : column + 1], past_key_values=cache)
        cache.reset()
        llama(ids, past_key_values=cache, logits_to_keep=1)
    assert cache.stats().tokens_reused == 12


def test_masks_may_have_any_dtype():
    shown = [[False, True, True]]
    for dtype in (torch.bool, torch.int32, torch.float16, torch.bfloat16):
        mask = torch.tensor(shown).to(dtype)
        call = ForwardCall.of({"input_ids": torch.ones(1, 3), "attention_mask": mask})
        assert call.real_columns(np.zeros((1, 0), bool)).tolist() == shown


def test_what_is_told_of_every_column_is_never_cut(llama, monkeypatch):
    ids, _ = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    monkeypatch.setattr(llama.config, "output_hidden_states", True)
    with torch.no_grad():
        for _ in range(2):
            out = llama(ids, past_key_values=cache, logits_to_keep=1)
            assert out.hidden_states[0].shape == (1, 40, 32)
            cache.reset()
        out = llama(ids, past_key_values=cache, logits_to_keep=1, output_hidden_states=False)
    assert cache.stats().tokens_reused == 32
    asked = ForwardCall.of({"input_ids": ids, "logits_to_keep": 1, "output_router_logits": True})
    assert asked.can_leave_out(llama.config) == 0


def test_tokens_are_known_though_the_caller_writes_the_next_into_the_same_tensor(llama):
    ids, mask = prompts(1, 12)
    cache = JaxkvCache(llama, max_tokens=256)
    said = greedy(llama, ids, mask, 24)
    token = torch.zeros(1, 1, dtype=torch.long)
    place = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        for column in range(12, 36):
            token.copy_(said[:, column : column + 1])
            place.fill_(column)
            llama(token, past_key_values=cache, position_ids=place)
    cache.reset()
    imagined = torch.cat([ids, token.expand(1, 30)], 1)
    ones = torch.ones_like(imagined)
    wanted = greedy(llama, imagined, ones, 4)
    assert torch.equal(greedy(llama, imagined, ones, 4, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0
    cache.reset()
    greedy(llama, said, torch.ones_like(said), 1, past_key_values=cache)
    assert cache.stats().tokens_reused == 32


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_no_prefix_is_kept_where_angles_depend_on_the_whole_text(kind):
    ids, mask = prompts(1, 60)

    def make():
        model = tiny_model("llama", max_position_embeddings=16, rope_parameters=ROPE[kind])
        return model, JaxkvCache(model, max_tokens=256)

    # Such a model remembers the longest text it has seen, so each text is asked of a new one.
    wanted = greedy(make()[0], ids, mask, 6)
    model, cache = make()
    greedy(model, ids[:, :16], mask[:, :16], 1, past_key_values=cache)
    cache.reset()
    assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0


ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}


@pytest.mark.parametrize("how", ["autocast", "training"])
def test_prefixes_go_when_they_were_computed_in_another_way(llama, how):
    ids, _ = prompts(1, 40)
    cache = JaxkvCache(llama, max_tokens=256)
    with torch.no_grad():
        wanted = llama(ids, logits_to_keep=1).logits
        llama.train(how == "training")
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            llama(ids, past_key_values=cache)
        llama.eval()
        cache.reset()
        got = llama(ids, past_key_values=cache, logits_to_keep=1).logits
    assert cache.stats().tokens_reused == 0
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_prefixes_go_when_weights_are_written_to():
    model = tiny_model("llama")
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 3, past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert torch.equal(
        greedy(model, ids, mask, 6, past_key_values=cache), greedy(model, ids, mask, 6)
    )
    assert cache.stats().tokens_reused == 0
