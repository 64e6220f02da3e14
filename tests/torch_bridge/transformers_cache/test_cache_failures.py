"""Errors of `JaxkvCache`: a failed forward, a full pool, and operations that pages do not support."""

import gc
import re

import pytest
import torch
import transformers

from jaxkv.errors import CacheLeased, CachePoisoned, OutOfPages
from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.tiny import FAMILIES, check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache, LeaseLeaked, lease

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


class Fault(RuntimeError):
    pass


def test_a_forward_that_fails_poisons_and_reset_is_the_way_back(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 12)
    greedy(llama, ids, mask, 3, past_key_values=cache)
    child = cache.fork()

    def fail(module, args):
        raise Fault("layer 1")

    hook = llama.model.layers[1].register_forward_pre_hook(fail)
    longer = torch.cat([ids, ids], 1)
    with pytest.raises(Fault):
        greedy(llama, longer, torch.ones_like(longer), 3, past_key_values=cache)
    hook.remove()
    for holder in (cache, child):
        with pytest.raises(CachePoisoned, match=r"Call reset\(\)") as raised:
            greedy(llama, longer, torch.ones_like(longer), 3, past_key_values=holder)
    assert "layer 1" in str(raised.value.__cause__)
    cache.reset()
    assert torch.equal(
        greedy(llama, ids, mask, 5, past_key_values=cache), greedy(llama, ids, mask, 5)
    )
    with pytest.raises(CachePoisoned, match="lost"):
        child.fork()
    child.reset()
    assert torch.equal(
        greedy(llama, ids, mask, 5, past_key_values=child), greedy(llama, ids, mask, 5)
    )
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_an_interrupt_in_a_forward_is_found_by_the_next(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 12)

    def interrupt(module, args):
        raise KeyboardInterrupt

    hook = llama.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(llama, ids, mask, 3, past_key_values=cache)
    hook.remove()
    with pytest.raises(CachePoisoned, match="lost"):
        greedy(llama, ids, mask, 3, past_key_values=cache)
    cache.reset()
    assert torch.equal(
        greedy(llama, ids, mask, 3, past_key_values=cache), greedy(llama, ids, mask, 3)
    )


def test_a_hook_that_keeps_a_leased_view_is_found(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 12)
    kept = []

    def keep(module, args):
        kept.append(cache._running.step.lease["layer0.key"][0])

    hook = llama.model.layers[1].register_forward_pre_hook(keep)
    with pytest.raises(LeaseLeaked, match=r"layer0\.key"):
        greedy(llama, ids, mask, 1, past_key_values=cache)
    hook.remove()
    kept.clear()
    cache.reset()
    check(cache)


def test_a_full_pool_says_so_loses_nothing_and_gives_prefixes_up_first(llama):
    cache = JaxkvCache(llama, max_tokens=64)
    ids, mask = prompts(1, 40)
    greedy(llama, ids, mask, 2, past_key_values=cache)
    cache.reset()
    other, _ = prompts(1, 40, seed=9)
    assert torch.equal(
        greedy(llama, other, mask, 8, past_key_values=cache), greedy(llama, other, mask, 8)
    )
    cache.reset()
    many, shown = prompts(3, 30, seed=4)
    with pytest.raises(
        OutOfPages, match=r"90 new tokens in 3 rows; give JaxkvCache a larger max_tokens$"
    ):
        greedy(llama, many, shown, 2, past_key_values=cache)
    check(cache)
    assert torch.equal(
        greedy(llama, other, mask, 8, past_key_values=cache), greedy(llama, other, mask, 8)
    )
    longer = torch.cat([other] * 3, 1)
    with pytest.raises(OutOfPages):
        greedy(llama, longer, torch.ones_like(longer), 2, past_key_values=cache)
    check(cache)


def test_a_pool_that_forks_fill_says_that_resetting_them_helps(llama):
    cache = JaxkvCache(llama, max_tokens=96)
    ids, mask = prompts(1, 30)
    said = greedy(llama, ids, mask, 2, past_key_values=cache)
    child = cache.fork()
    longer = torch.cat([said, ids], 1)[:, :60]
    ones = torch.ones_like(longer)
    greedy(llama, longer, ones, 1, past_key_values=child)
    with pytest.raises(OutOfPages, match=r"larger max_tokens, or reset\(\) forks that are done$"):
        greedy(llama, longer, ones, 1, past_key_values=cache)
    child.reset(keep_prefix=False)
    assert greedy(llama, longer, ones, 1, past_key_values=cache).shape == (1, 61)
    check(cache)


def test_masks_that_pages_cannot_follow_are_refused(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(2, 12, (3, 0))
    said = greedy(llama, ids, mask, 2, past_key_values=cache)
    full = torch.ones_like(said)
    with torch.no_grad():
        with pytest.raises(ValueError, match="other columns than when"):
            llama(said[:, 13:], attention_mask=full, past_key_values=cache)
        with pytest.raises(ValueError, match="this one has none"):
            llama(said[:, 13:], past_key_values=cache)
        with pytest.raises(ValueError, match=r"must be \[2, 14\]"):
            llama(said[:, 13:], attention_mask=full[:, :9], past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows, this forward has 1"):
            llama(said[:1, 13:], attention_mask=full[:1], past_key_values=cache)
    check(cache)


def test_a_cache_used_outside_its_models_forward_says_so(llama, models):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, _ = prompts(1, 5)
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside of the forward of the model"):
        llama.model(ids, past_key_values=cache)
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside of the forward of the model"):
        models["qwen3"](ids, past_key_values=cache)


def test_gradients_through_the_cache_are_refused_not_wrong(llama):
    ids, _ = prompts(1, 6)
    cache = JaxkvCache(llama, max_tokens=256)
    loss = llama(ids, past_key_values=cache).logits.sum()
    with pytest.raises(RuntimeError, match="have no gradient"):
        loss.backward()
    llama.zero_grad()
    gc.collect()
    with lease(cache) as views:
        views.commit()


def test_models_that_remember_otherwise_and_odd_sizes_are_refused(llama):
    encoder = transformers.T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration has an encoder"):
        JaxkvCache(transformers.T5ForConditionalGeneration(encoder))
    for options in ({"max_tokens": 0}, {"max_tokens": True}, {"page_size": 1.5}):
        with pytest.raises(ValueError, match="must be a positive integer"):
            JaxkvCache(llama, **options)


def test_a_lease_that_is_out_refuses_forwards_and_costs_nothing(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 12)
    with lease(cache) as views:
        with pytest.raises(CacheLeased, match=r"test_cache_failures\.py"):
            greedy(llama, ids, mask, 3, past_key_values=cache)
        views.commit()
    wanted = greedy(llama, ids, mask, 3)
    assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=cache), wanted)
    check(cache)


@pytest.mark.parametrize("order", [[0, 2], [-1, 0], []])
def test_rows_that_are_not_there_cannot_be_chosen(llama, order):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(2, 8)
    cache.reorder_cache(torch.tensor(order, dtype=torch.long))
    said = greedy(llama, ids, mask, 2, past_key_values=cache)
    hint = "" if order else r"; reset\(\) drops all rows"
    with pytest.raises(
        ValueError, match=rf"chosen by numbers from 0 to 1, .* got {re.escape(str(order))}{hint}$"
    ):
        cache.batch_select_indices(torch.tensor(order, dtype=torch.long))
    shown = torch.ones(2, 12, dtype=torch.long)
    longer = torch.cat([said, said[:, :2]], 1)
    wanted = greedy(llama, longer, shown, 2)
    assert torch.equal(greedy(llama, longer, shown, 2, past_key_values=cache), wanted)


def test_a_session_survives_a_failed_forward_and_a_reset(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 12)

    def fail(module, args):
        raise Fault("inside the session")

    with cache.session():
        hook = llama.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            greedy(llama, ids, mask, 3, past_key_values=cache)
        hook.remove()
        cache.reset()
        wanted = greedy(llama, ids, mask, 3)
        assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=cache), wanted)
        with pytest.raises(CacheLeased):
            cache.owner.handle()
    check(cache)


def test_keys_that_the_pages_would_round_are_refused(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 5)
    hook = llama.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda *call: call[-1].double()
    )
    with pytest.raises(
        ValueError, match=r"layer 1 has keys in torch\.float64, which pages in torch\.float32 would"
    ):
        greedy(llama, ids, mask, 2, past_key_values=cache)
    hook.remove()


def test_attention_of_another_shape_than_was_planned_is_refused(llama, monkeypatch):
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.model_layout._heads_by_layer", lambda model: {0: (1, 16)}
    )
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 5)
    with pytest.raises(
        ValueError, match="has keys of 2 heads of 16, but the cache was made for 1 of 16"
    ):
        greedy(llama, ids, mask, 2, past_key_values=cache)
