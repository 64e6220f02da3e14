"""Models with recurrent layers: states in the pool, beside pages where layers attend; Transformers' own tokens."""

import pytest
import torch
from transformers import DynamicCache

from jaxkv.errors import CachePoisoned
from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.tiny import check, greedy, prompts
from tests.torch_bridge.tiny_recurrent import RECURRENT, cache_name, recurrent_model
from torch_bridge import JaxkvCache, LeaseLeaked

pytestmark = pytest.mark.torch
QUICK = ("Bamba", "Mamba2", "Lfm2")
FAMILIES = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in RECURRENT
]


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(family):
        if family not in made:
            made[family] = recurrent_model(family)
        return made[family]

    return model


def generated(model, ids, mask, count, cache=None, **options):
    if cache is not None:
        options[cache_name(model)] = cache
    torch.manual_seed(7)
    return greedy(model, ids, mask, count, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_own_cache(models, family):
    model = models(family)
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    # All rows have padding, which inputs with a bias carry into the convolutions.
    ids, mask = prompts(2, 19, (4, 1))
    wanted = generated(model, ids, mask, 9)
    assert torch.equal(generated(model, ids, mask, 9, cache), wanted)
    assert len(wanted[:, 19:].unique()) > 5
    check(cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_padding_on_the_right_beams_and_samples_are_transformers_own(models, family):
    model = models(family)
    cache = JaxkvCache(model, max_tokens=512, page_size=8)
    ids, mask = prompts(2, 19)
    padded, shown = ids.clone(), mask.clone()
    padded[0, 16:] = 0
    shown[0, 16:] = 0
    for tokens, real, options in (
        (padded, shown, {}),
        (ids, mask, {"num_beams": 3}),
        (ids, mask, {"num_return_sequences": 2, "do_sample": True}),
    ):
        call = {"max_new_tokens": 9, "attention_mask": real, "do_sample": False, **options}
        torch.manual_seed(3)
        wanted = model.generate(tokens, **call)
        torch.manual_seed(3)
        assert torch.equal(model.generate(tokens, **call, **{cache_name(model): cache}), wanted)
        cache.reset()
    check(cache)


def test_a_prompt_in_chunks_may_begin_with_a_chunk_of_padding(models):
    model = models("Bamba")
    ids, mask = prompts(2, 19, (11, 0))
    options = {"prefill_chunk_size": 4}
    wanted = generated(model, ids, mask, 6, **options)
    cache = JaxkvCache(model, max_tokens=256)
    assert torch.equal(generated(model, ids, mask, 6, cache, **options), wanted)
    check(cache)


def test_a_row_of_padding_alone_has_its_state_in_forks_and_later_forwards(models):
    model = models("Bamba")
    ids, _ = prompts(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def logits(cache):
        with torch.no_grad():
            model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
            if isinstance(cache, JaxkvCache):
                cache = cache.fork()
            return model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits

    torch.testing.assert_close(
        logits(JaxkvCache(model, max_tokens=64)), logits(DynamicCache(config=model.config))
    )


def test_states_side_by_side_are_updated_in_the_pool(models):
    model = models("Lfm2")
    cache = JaxkvCache(model, max_tokens=64)
    ids, mask = prompts(2, 9)
    in_pool = []

    def look(module, args):
        pool = cache._running.step.lease["layer0.conv"]
        part = cache.layers[0].conv_states[0]
        in_pool.append(part.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr())

    hook = model.model.layers[1].register_forward_pre_hook(look)
    try:
        generated(model, ids, mask, 3, cache)
    finally:
        hook.remove()
    assert in_pool == [True] * 3
    check(cache)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_forward_that_fails_between_layers_leaves_no_state_behind(models, layer):
    model = models("Bamba")
    ids, mask = prompts(1, 12)
    cache = JaxkvCache(model, max_tokens=256)
    generated(model, ids, mask, 3, cache)
    child = cache.fork()

    def fail(module, args, out):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_hook(fail)
    longer = torch.cat([ids, ids], 1)
    with pytest.raises(KeyboardInterrupt):
        generated(model, longer, torch.ones_like(longer), 3, cache)
    hook.remove()
    for holder in (cache, child):
        with pytest.raises(CachePoisoned, match=r"Call reset\(\)"):
            generated(model, longer, torch.ones_like(longer), 3, holder)
    assert all(one.conv_states[0] is None for one in cache.layers if hasattr(one, "conv_states"))
    cache.reset()
    assert torch.equal(generated(model, ids, mask, 3, cache), generated(model, ids, mask, 3))
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_a_state_that_outlives_its_forward_is_found(models):
    model = models("Mamba2")
    ids, mask = prompts(1, 9)
    cache = JaxkvCache(model, max_tokens=64)
    kept = []

    def keep(module, args):
        kept.append(cache.layers[0].recurrent_states[0])

    hook = model.backbone.layers[1].register_forward_pre_hook(keep)
    with pytest.raises(LeaseLeaked, match=r"layer0\.ssm"):
        generated(model, ids, mask, 1, cache)
    hook.remove()
    kept.clear()
    cache.reset()
    assert torch.equal(generated(model, ids, mask, 3, cache), generated(model, ids, mask, 3))
    check(cache)


def test_a_cache_may_go_while_its_model_holds_outputs(models):
    model = models("Mamba2")
    ids, mask = prompts(1, 9)
    wanted = generated(model, ids, mask, 4)
    cache, other = (JaxkvCache(model, max_tokens=64) for _ in range(2))
    generated(model, ids, mask, 2, cache)
    # Copies where a gradient may be recorded.
    out = model(ids[:, :1], cache_params=cache)
    del cache
    assert torch.isfinite(out.logits).all()
    assert torch.equal(generated(model, ids, mask, 4, other), wanted)
    check(other)


def test_layers_that_leave_the_cache_out_are_named(models):
    model = models("Mamba2")
    ids, _ = prompts(1, 5)
    cache = JaxkvCache(model, max_tokens=64)
    hook = model.backbone.layers[1].mixer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "cache_params": None}), with_kwargs=True
    )
    with pytest.raises(RuntimeError, match=r"layers \[1\] took no notice"), torch.no_grad():
        model(ids, cache_params=cache)
    hook.remove()
    cache.reset()
    check(cache)


def test_tokens_of_recurrent_layers_cannot_be_taken_back(models):
    cache = JaxkvCache(models("Lfm2"), max_tokens=64)
    assert not cache.is_croppable
    with pytest.raises(Unsupported, match="recurrent layers"):
        cache.activate_past_recording()
