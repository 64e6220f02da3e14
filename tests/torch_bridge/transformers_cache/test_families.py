"""Many families of models with odd options: the tokens of Transformers' own cache, however they are generated."""

import pytest
import torch

from tests.torch_bridge.tiny import check, greedy, prompts
from tests.torch_bridge.transformers_cache.families import FAMILIES, model_of
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch

FAST = ("cohere2", "deepseek_v2", "gpt_oss")
"""Families that differ most from those of the other tests."""


def slow_but(chosen, families=FAMILIES):
    return [one if one in chosen else pytest.param(one, marks=pytest.mark.slow) for one in families]


def padded():
    """Returns prompts of three rows with padding on both sides."""
    ids, mask = prompts(3, 30, (3, 0, 12))
    ids[1, -2:] = mask[1, -2:] = 0
    return ids, mask


@pytest.mark.parametrize("family", slow_but(FAST))
def test_padded_rows_have_the_tokens_of_transformers_before_and_after_reuse(family):
    model = model_of(family)
    ids, mask = padded()
    wanted = greedy(model, ids, mask, 6)
    cache = JaxkvCache(model, max_tokens=256, page_size=4)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
        check(cache)
        cache.reset()
    assert cache.stats().tokens_reused > 40
    assert len(wanted[:, 30:].unique()) > 4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["beams", "sampled", "looked up"])
def test_other_ways_to_generate_have_the_tokens_of_transformers(family, how):
    model = model_of(family)
    ids, mask = padded() if how == "beams" else prompts(1, 30)
    options = {"max_new_tokens": 12, "attention_mask": mask, "do_sample": how == "sampled"}
    options |= {
        "beams": {"num_beams": 3},
        "sampled": {"num_return_sequences": 3, "top_k": 20},
        "looked up": {"prompt_lookup_num_tokens": 3},
    }[how]
    torch.manual_seed(5)
    wanted = model.generate(ids, **options)
    cache = JaxkvCache(model, max_tokens=512, page_size=4)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
    check(cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_forks_and_texts_that_were_cut_go_on_as_in_a_new_cache(family):
    model = model_of(family)
    ids, mask = prompts(2, 21, (4, 0))
    cache = JaxkvCache(model, max_tokens=512, page_size=4)
    said = greedy(model, ids, mask, 9, past_key_values=cache)
    shown = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], 1)
    child = cache.fork()
    cache.crop(-4)
    for holder, kept in ((cache, 25), (child, 29)):
        more, ones = prompts(2, 7, seed=kept)
        text, seen = torch.cat([said[:, :kept], more], 1), torch.cat([shown[:, :kept], ones], 1)
        wanted = greedy(model, text, seen, 6)
        assert torch.equal(greedy(model, text, seen, 6, past_key_values=holder), wanted)
    check(cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name for name, (_, more) in FAMILIES.items() if "kv_lora_rank" not in more]
)
def test_attention_over_pages_has_the_tokens_of_transformers(family):
    model = model_of(family)
    ids, mask = prompts(2, 21, (4, 0))
    wanted = greedy(model, ids, mask, 9)
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=256)
    assert torch.equal(greedy(model, ids, mask, 9, past_key_values=cache), wanted)
    check(cache)
