"""Prefix reuse of models with recurrent layers: texts begin from states that were kept at the ends of earlier ones."""

import pytest
import torch

from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import CachePoisoned
from tests.torch_bridge.tiny import check, greedy, prompts
from tests.torch_bridge.tiny_recurrent import RECURRENT, cache_name, recurrent_model
from torch_bridge import JaxkvCache, generate, lease

pytestmark = pytest.mark.torch
FROM_ZERO = ("Mamba", "FalconMamba", "Jamba")
QUICK = ("Bamba", "Mamba2")
FAMILIES = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in RECURRENT
    if family not in FROM_ZERO
]


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(family):
        if family not in made:
            made[family] = recurrent_model(family)
        return made[family]

    return model


def generated(model, ids, count, cache=None, pads=0):
    options = {} if cache is None else {cache_name(model): cache}
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    return greedy(model, ids, mask, count, **options)


def turn(said, count, seed):
    """Returns a text with `count` more tokens per row."""
    return torch.cat([said, prompts(len(said), count, seed=seed)[0]], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_begins_where_the_one_before_it_ended(models, family):
    model = models(family)
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    ids, _ = prompts(2, 13)
    said = generated(model, ids, 6, cache)
    cache.reset()
    longer = turn(said, 4, 2)
    wanted = generated(model, longer, 5)
    assert torch.equal(generated(model, longer, 5, cache), wanted)
    # All but the last token of the first turn's answer, which was never computed.
    assert cache.stats().tokens_reused == 2 * 18
    cache.reset()
    check(cache)


@pytest.mark.parametrize("family", [pytest.param(one, marks=pytest.mark.slow) for one in FROM_ZERO])
def test_nothing_is_reused_where_transformers_scans_begin_at_zero(models, family):
    model = models(family)
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    said = generated(model, prompts(2, 13)[0], 6, cache)
    cache.reset()
    longer = turn(said, 4, 2)
    assert torch.equal(generated(model, longer, 5, cache), generated(model, longer, 5))
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_another_answer_begins_at_the_end_of_the_prompt(models):
    model = models("Bamba")
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    ids, _ = prompts(1, 21)
    generated(model, ids, 6, cache)
    cache.reset()
    other = turn(ids, 3, 4)
    wanted = generated(model, other, 5)
    assert torch.equal(generated(model, other, 5, cache), wanted)
    assert cache.stats().tokens_reused == 21
    # A text that ends before any kept state is computed anew, though its pages are kept and not written again.
    cache.reset()
    shorter = ids[:, :18]
    assert torch.equal(generated(model, shorter, 7, cache), generated(model, shorter, 7))
    assert cache.stats().tokens_reused == 21
    check(cache)


def test_pages_in_the_index_are_not_written_when_their_tokens_are_computed_again(models):
    model = models("Bamba")
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    ids, _ = prompts(1, 21)
    generated(model, ids, 1, cache)
    cache.reset()
    with lease(cache) as views:
        # Marks all keys; a forward that wrote the kept pages again would remove the marks.
        views["layer1.key"].fill_(0.5)
        views.commit()
    generated(model, ids, 1, cache)
    row = cache._sequences.rows[0].number
    pages = cache._store.allocator.pages(row, "gqa")
    with lease(cache) as views:
        marked = (views["layer1.key"][list(pages)] == 0.5).flatten(1).all(1).tolist()
        views.commit()
    assert cache.stats().tokens_reused == 0
    assert marked == [True, True, False]
    cache.reset()
    check(cache)


def test_forks_keep_the_state_that_they_share(models):
    model = models("Mamba2")
    cache = JaxkvCache(model, max_tokens=256)
    ids, _ = prompts(1, 9)
    said = generated(model, ids, 4, cache)
    child = cache.fork()
    cache.reset()
    longer = turn(said[:, :-1], 2, 6)
    assert torch.equal(generated(model, longer, 4, cache), generated(model, longer, 4))
    assert cache.stats().tokens_reused == 12
    child.reset()
    check(cache)


def test_rows_with_padding_neither_keep_nor_begin_from_states(models):
    model = models("Bamba")
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    ids, _ = prompts(1, 16)
    generated(model, ids, 3, cache)
    cache.reset()
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), turn(ids, 2, 3)], 1)
    wanted = generated(model, padded, 4, pads=2)
    assert torch.equal(generated(model, padded, 4, cache, pads=2), wanted)
    cache.reset()
    longer = turn(turn(ids, 2, 3), 2, 5)
    assert torch.equal(generated(model, longer, 4, cache), generated(model, longer, 4))
    assert cache.stats().tokens_reused == 16
    check(cache)


def test_states_are_kept_of_one_state_of_the_model_only():
    model = recurrent_model("Mamba2")
    cache = JaxkvCache(model, max_tokens=256)
    ids, _ = prompts(1, 12)
    said = generated(model, ids, 4, cache)
    cache.reset()
    with torch.no_grad():
        model.backbone.layers[0].mixer.dt_bias.add_(1.5)
    longer = turn(said, 3, 2)
    assert torch.equal(generated(model, longer, 4, cache), generated(model, longer, 4))
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_a_failed_forward_leaves_no_kept_state(models):
    model = models("Bamba")
    cache = JaxkvCache(model, max_tokens=256, page_size=8)
    ids, _ = prompts(1, 12)
    said = generated(model, ids, 4, cache)
    cache.reset()

    def fail(module, args, out):
        raise KeyboardInterrupt

    hook = model.model.layers[0].register_forward_hook(fail)
    longer = turn(said, 3, 2)
    with pytest.raises(KeyboardInterrupt):
        generated(model, longer, 4, cache)
    hook.remove()
    with pytest.raises(CachePoisoned):
        generated(model, longer, 4, cache)
    cache.reset()
    assert torch.equal(generated(model, longer, 4, cache), generated(model, longer, 4))
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_kept_states_give_way_to_rows(models):
    model = models("Mamba2")
    cache = JaxkvCache(model, max_tokens=256, max_sequences=2)
    for seed in range(4):
        ids, _ = prompts(2, 7, seed=seed)
        assert torch.equal(generated(model, ids, 4, cache), generated(model, ids, 4))
        cache.reset()
        check(cache)
    assert 1 <= cache._store.index.num_checkpoints <= 2


def test_a_continuous_batch_beside_kept_states_computes_whole_prompts(models):
    model = models("Mamba2")
    cache = JaxkvCache(model, max_tokens=512)
    said = generated(model, prompts(1, 13)[0], 6, cache)
    cache.reset()
    longer = turn(said, 4, 2)
    wanted = generated(model, longer, 5)[0, longer.shape[1] :].tolist()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    [out] = generate(model, [longer[0].tolist()], params, cache=cache)
    assert (out.token_ids, out.usage.cached_tokens) == (wanted, 0)
    check(cache)
    assert torch.equal(generated(model, longer, 5, cache), generated(model, longer, 5))
    assert cache.stats().tokens_reused == 18
    check(cache)
