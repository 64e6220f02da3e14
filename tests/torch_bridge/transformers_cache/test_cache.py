"""Transformers models with `JaxkvCache`: the tokens of Transformers' cache, with padding, beams, forks, sessions."""

import copy
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jaxkv.cache.state import Cache
from jaxkv.errors import CacheLeased
from tests.torch_bridge.tiny import FAMILIES, check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


PADDED = (5, 0, 17)


@pytest.mark.parametrize(
    ("family", "pads"), [("llama", ()), *((family, PADDED) for family in FAMILIES)]
)
def test_tokens_are_those_of_transformers_own_cache(models, family, pads):
    model = models[family]
    ids, mask = prompts(3, 21, pads)
    cache = JaxkvCache(model, max_tokens=512)
    wanted = greedy(model, ids, mask, 20)
    assert torch.equal(greedy(model, ids, mask, 20, past_key_values=cache), wanted)
    assert cache.stats().tokens_computed == int(mask.sum()) + 3 * 19
    assert len(wanted[:, 21:].unique()) > 8
    check(cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_those_of_transformers_own_cache(models, family):
    model = models[family]
    ids, mask = prompts(2, 15, (0, 4))
    options = {"output_logits": True, "return_dict_in_generate": True}
    wanted = greedy(model, ids, mask, 8, **options).logits
    got = greedy(model, ids, mask, 8, past_key_values=JaxkvCache(model), **options).logits
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_sampling_and_several_answers_are_those_of_transformers(llama):
    ids, mask = prompts(2, 9)
    options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(3)
    wanted = llama.generate(ids, attention_mask=mask, **options)
    torch.manual_seed(3)
    cache = JaxkvCache(llama, max_tokens=512)
    assert torch.equal(
        llama.generate(ids, attention_mask=mask, past_key_values=cache, **options), wanted
    )


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_beams_are_those_of_transformers(models, family):
    model = models[family]
    ids, mask = prompts(2, 19, (3, 0))
    options = {"num_beams": 3}
    cache = JaxkvCache(model, max_tokens=512)
    wanted = greedy(model, ids, mask, 12, **options)
    assert torch.equal(greedy(model, ids, mask, 12, past_key_values=cache, **options), wanted)
    check(cache)


def test_a_prompt_in_pieces_gives_the_same_tokens(llama):
    ids, mask = prompts(2, 30, (4, 0))
    cache = JaxkvCache(llama, max_tokens=512)
    with torch.no_grad():
        llama(
            ids[:, :11],
            attention_mask=mask[:, :11],
            past_key_values=cache,
            position_ids=places(mask)[:, :11],
        )
    assert torch.equal(
        greedy(llama, ids, mask, 8, past_key_values=cache), greedy(llama, ids, mask, 8)
    )


def places(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_a_mask_with_a_hole_hides_the_same_columns(llama):
    ids, mask = prompts(2, 20)
    mask[0, 6:9] = 0
    cache = JaxkvCache(llama, max_tokens=512)
    wanted = greedy(llama, ids, mask, 8)
    assert torch.equal(greedy(llama, ids, mask, 8, past_key_values=cache), wanted)
    assert cache.stats().tokens_computed == 37 + 14


def test_a_fork_and_its_parent_go_on_by_themselves(llama):
    ids, mask = prompts(2, 21, (0, 3))
    cache = JaxkvCache(llama, max_tokens=512)
    said = greedy(llama, ids, mask, 6, past_key_values=cache)
    twins = (cache, cache.fork(), copy.deepcopy(cache))
    free = cache._store.allocator.num_free("gqa")
    for seed, holder in enumerate(twins):
        more, ones = prompts(2, 7, seed=seed + 5)
        longer = torch.cat([said, more], 1)
        shown = torch.cat([mask, torch.ones(2, 6, dtype=torch.long), ones], 1)
        wanted = greedy(llama, longer, shown, 8)
        assert torch.equal(greedy(llama, longer, shown, 8, past_key_values=holder), wanted)
        assert holder.stats().tokens_reused == 0
    assert twins[1].stats().tokens_computed == 2 * (7 + 1 + 7)
    assert cache._store.allocator.num_free("gqa") < free
    check(cache)


def test_a_cache_takes_its_hooks_and_pages_with_it(llama):
    hooks = len(llama._forward_hooks), len(llama._forward_pre_hooks)
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(1, 20)
    greedy(llama, ids, mask, 3, past_key_values=cache)
    free = cache._store.allocator.num_free("gqa")
    child = cache.fork()
    more = torch.cat([ids, ids], 1)
    greedy(llama, more, torch.ones_like(more), 2, past_key_values=child)
    assert cache._store.allocator.num_free("gqa") < free
    del child
    assert cache._store.allocator.num_free("gqa") == free
    del cache
    assert (len(llama._forward_hooks), len(llama._forward_pre_hooks)) == hooks


def test_other_caches_of_the_same_model_are_left_alone(llama):
    ids, mask = prompts(1, 12)
    wanted = greedy(llama, ids, mask, 5)
    cache = JaxkvCache(llama, max_tokens=256)
    assert torch.equal(greedy(llama, ids, mask, 5), wanted)
    assert cache.stats().tokens_computed == cache.stats().leases_taken == 0


def test_stats_count_tokens_bytes_and_leases(llama):
    cache = JaxkvCache(llama, max_tokens=100)
    ids, mask = prompts(2, 10)
    greedy(llama, ids, mask, 4, past_key_values=cache)
    stats = cache.stats()
    assert cache.max_tokens == 112
    assert stats.bytes == 112 * 2 * 2 * 2 * 16 * 4
    assert (stats.tokens_computed, stats.tokens_reused, stats.leases_taken) == (26, 0, 1)


def test_a_session_takes_one_lease_and_gives_the_same_tokens(llama):
    cache = JaxkvCache(llama, max_tokens=256)
    ids, mask = prompts(2, 10, (0, 2))
    wanted = greedy(llama, ids, mask, 12)
    with cache.session():
        assert torch.equal(greedy(llama, ids, mask, 12, past_key_values=cache), wanted)
        with pytest.raises(CacheLeased, match=r"test_cache\.py"):
            cache.owner.handle()
        with pytest.raises(ValueError, match="session is open already"), cache.session():
            pass
    assert cache.stats().leases_taken == 1
    check(cache)


def test_both_frameworks_see_one_memory(llama):
    cache = JaxkvCache(llama, max_tokens=64, page_size=8)
    ids, mask = prompts(1, 8)
    seen = []
    hook = llama.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, args, out: seen.append(out)
    )
    greedy(llama, ids, mask, 1, past_key_values=cache)
    hook.remove()
    pages = cache.owner.handle().cache.arrays[0]
    assert pages.shape == (8, 8, 2, 16)
    # The rotation of the first position turns nothing.
    torch.testing.assert_close(
        torch.tensor(np.array(pages[0, 0], copy=True)).flatten(), seen[0][0, 0], rtol=0, atol=1e-6
    )


def test_jax_may_move_pages_between_forwards(llama):
    """Turns the order of all pages about in JAX, twice and in place: generation goes on at the same addresses."""
    cache = JaxkvCache(llama, max_tokens=64, page_size=8)
    ids, mask = prompts(1, 20)
    said = greedy(llama, ids, mask, 1, past_key_values=cache)
    wanted = greedy(llama, said, torch.ones_like(said), 6)
    before = [a.unsafe_buffer_pointer() for a in cache.owner.handle().cache.arrays]
    backwards = jax.jit(
        lambda c: (Cache(arrays=tuple(a[::-1] for a in c.arrays), keys=c.keys), 0), donate_argnums=0
    )
    cache.owner.run(backwards)
    cache.owner.run(backwards)
    assert [a.unsafe_buffer_pointer() for a in cache.owner.handle().cache.arrays] == before
    got = greedy(llama, said, torch.ones_like(said), 6, past_key_values=cache)
    assert torch.equal(got, wanted)


def python_blocks(page):
    """Returns the Python blocks of a page that need the bridge."""
    text = (Path(__file__).parents[3] / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in blocks if "torch_bridge" in block or "fork()" in block]


def test_the_readme_is_right_about_the_bridge():
    names = {}
    [block] = python_blocks("README.md")
    # In bfloat16 two attentions round otherwise, and the block's text has near ties.
    wide = block.replace("default_model.path()", "default_model.path(), dtype=torch.float32")
    assert wide != block
    exec(wide, names)
    model, ids = names["model"], names["ids"]
    model.set_attn_implementation("sdpa")
    assert torch.equal(names["out"], greedy(model, ids, torch.ones_like(ids), 32))
    model.set_attn_implementation("jaxkv")
    greedy(model, ids, torch.ones_like(ids), 1, past_key_values=names["cache"])
    assert names["cache"].stats().tokens_reused == 32


def test_the_page_of_the_bridge_has_the_tokens_of_transformers(capsys):
    names = {}
    for block in python_blocks("docs/how-to/transformers.md")[:2]:
        exec(block, names)
    said, code, tokenizer = names["ids"], names["code"], names["tokenizer"]
    prompts = [tokenizer(code + end).input_ids for end in ("        self.", "        return ")]
    alike = next(i for i, (one, other) in enumerate(zip(*prompts, strict=False)) if one != other)
    assert capsys.readouterr().out.split() == [str(alike // 16 * 16), "tokens", "reused", "2"]
    model = names["model"].set_attn_implementation("sdpa") or names["model"]
    ids = torch.tensor([prompts[1]])
    assert torch.equal(said, greedy(model, ids, torch.ones_like(ids), 32))
    with pytest.raises(ValueError, match=r"before another prompt, call reset\(\)"):
        greedy(model, ids, torch.ones_like(ids), 2, past_key_values=names["child"])
