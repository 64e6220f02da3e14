"""`crop` and beams of `JaxkvCache`: tokens are taken back, rows reordered, and no shared page is written or copied."""

import pytest
import torch
import transformers

from jaxkv.errors import OutOfPages
from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.transformers_cache.store import Store

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*generation_config.*generation-related:UserWarning"),
]


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(family) for family in ("llama", "mistral", "gemma3")}


@pytest.fixture(scope="module")
def llama(models):
    return models["llama"]


def a_draft():
    """Returns a model whose tokens are often, and not always, those of the tiny Llama."""
    draft = tiny_model("llama")
    draft.generation_config.assistant_confidence_threshold = 0
    draft.generation_config.num_assistant_tokens = 5
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.04 * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.fixture
def crops(monkeypatch):
    """The numbers of columns that the caches of this test took back."""
    counts, crop = [], JaxkvCache.crop
    monkeypatch.setattr(
        JaxkvCache, "crop", lambda self, n: (counts.append(-int(n)), crop(self, n))[1]
    )
    return counts


def last_logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, logits_to_keep=1, **options).logits


# A draft with windows fails in Transformers' own cache, which a draft always has.
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", "draft"),
        ("llama", "sampled draft"),
        ("llama", "lookup"),
        pytest.param("mistral", "lookup", marks=pytest.mark.slow),
        pytest.param("gemma3", "lookup", marks=pytest.mark.slow),
    ],
)
def test_assisted_tokens_are_those_of_transformers_own_cache(models, family, how, crops):
    model = models[family]
    ids, mask = prompts(1, 21)
    ids[:, 12:18] = ids[:, 3:9]
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": how == "sampled draft"}
    options |= (
        {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": a_draft()}
    )
    torch.manual_seed(2)
    wanted = model.generate(ids, **options)
    cache = JaxkvCache(model, max_tokens=64, page_size=4)
    for _ in range(2):
        torch.manual_seed(2)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
        check(cache)
        cache.reset()
    assert max(crops) > 1
    assert cache.stats().tokens_reused > 0


@pytest.mark.parametrize("pads", [(), (0, 6)])
def test_after_tokens_are_taken_back_others_follow_as_in_a_new_cache(llama, pads):
    ids, mask = prompts(2, 21, pads)
    other, _ = prompts(2, 21, pads, seed=5)
    other[:, :13] = ids[:, :13]
    cache = JaxkvCache(llama, max_tokens=64, page_size=4)
    free = cache._store.allocator.num_free("gqa")
    with torch.no_grad():
        llama(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-8)
    held = sum(-(-int(line) // 4) for line in mask[:, :13].sum(1))
    assert cache.get_seq_length() == 13
    # The prompt was published, so its full pages stay with the prefix index until they are needed.
    assert (
        cache._store.allocator.num_free("gqa") + cache._store.allocator.num_reclaimable("gqa")
        == free - held
    )
    assert torch.equal(
        greedy(llama, other, mask, 9, past_key_values=cache), greedy(llama, other, mask, 9)
    )
    check(cache)


def test_tokens_that_were_taken_back_are_found_as_what_they_were(llama):
    """Pages of a text that was cut are found by their own tokens, and those of its new end by the new ones."""
    ids, mask = prompts(1, 24)
    other, _ = prompts(1, 24, seed=5)
    other[:, :10] = ids[:, :10]
    cache = JaxkvCache(llama, max_tokens=128, page_size=4)
    greedy(llama, ids, mask, 1, past_key_values=cache)
    cache.crop(-14)
    with torch.no_grad():
        llama(other[:, 10:], past_key_values=cache)
    cache.reset()
    reused = 0
    for text in (ids, other):
        wanted = greedy(llama, text, mask, 6)
        assert torch.equal(greedy(llama, text, mask, 6, past_key_values=cache), wanted)
        reused += 23
        assert cache.stats().tokens_reused == reused
        cache.reset()
    check(cache)


def test_tokens_taken_back_before_they_were_read_are_in_no_prefix(llama):
    ids, mask = prompts(1, 10)
    said = greedy(llama, ids, mask, 6)
    cache = JaxkvCache(llama, max_tokens=64, page_size=4)
    greedy(llama, ids, mask, 6, past_key_values=cache)
    cache.crop(-3)
    token = said[:, 12:13] + 1
    with torch.no_grad():
        llama(torch.cat([token] * 4, 1), past_key_values=cache)
    cache.reset()
    both = [said, torch.cat([said[:, :12], token, token, token, token], 1)]
    ones = torch.ones_like(said)
    for text in both:
        wanted = greedy(llama, text, ones, 5)
        assert torch.equal(greedy(llama, text, ones, 5, past_key_values=cache), wanted)
        cache.reset()
    assert cache.stats().tokens_reused == 12 + 15


def test_a_fork_keeps_what_its_parent_takes_back(llama):
    ids, mask = prompts(1, 18)
    cache = JaxkvCache(llama, max_tokens=96, page_size=4)
    said = greedy(llama, ids, mask, 5, past_key_values=cache)
    child = cache.fork()
    cache.crop(-9)
    other = torch.cat([said[:, :13], said[:, :7] + 1], 1).clamp(max=95)
    for holder, text in ((cache, other), (child, said)):
        ones = torch.ones_like(text)
        wanted = greedy(llama, text, ones, 6)
        assert torch.equal(greedy(llama, text, ones, 6, past_key_values=holder), wanted)
    check(cache)


def test_all_tokens_can_be_taken_back(llama):
    ids, mask = prompts(2, 9, (2, 0))
    cache = JaxkvCache(llama, max_tokens=64)
    greedy(llama, ids, mask, 3, past_key_values=cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    wanted = greedy(llama, ids, mask, 5)
    assert torch.equal(greedy(llama, ids, mask, 5, past_key_values=cache), wanted)
    check(cache)


def test_a_window_that_began_from_a_prefix_is_not_cut_into_it(models):
    """A hit needs the pages that its window sees alone, so those before them are not there to go back to."""
    model = models["mistral"]
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=128, page_size=4)
    greedy(model, ids, mask, 1, past_key_values=cache)
    cache.reset()
    greedy(model, ids, mask, 1, past_key_values=cache)
    assert cache.stats().tokens_reused == 39
    cache.crop(-2)
    with pytest.raises(
        ValueError, match=r"lacks pages of window.* before token 23 needs; compute it again"
    ):
        cache.crop(-15)
    assert cache.get_seq_length() == 38
    text = torch.cat([ids[:, :38], ids[:, :5]], 1)
    ones = torch.ones_like(text)
    assert torch.equal(
        greedy(model, text, ones, 5, past_key_values=cache), greedy(model, text, ones, 5)
    )


def test_rows_that_found_pages_beside_one_that_did_not_give_them_back(llama):
    ids, mask = prompts(2, 8, (0, 3))
    cache = JaxkvCache(llama, max_tokens=28, page_size=4)
    greedy(llama, ids, mask, 1, past_key_values=cache)
    free = cache._store.allocator.num_free("gqa")
    more, ones = prompts(2, 9, seed=5)
    with torch.no_grad(), pytest.raises(OutOfPages, match="18 new tokens in 2 rows"):
        llama(more, attention_mask=torch.cat([mask, ones], 1), past_key_values=cache)
    assert cache._store.allocator.num_free("gqa") == free
    child = cache.fork()
    text, shown = torch.cat([ids, more[:, :1]], 1), torch.cat([mask, ones[:, :1]], 1)
    wanted = greedy(llama, text, shown, 2)
    assert torch.equal(greedy(llama, text, shown, 2, past_key_values=child), wanted)
    check(cache)


def test_what_cannot_be_taken_back_is_refused(llama):
    cache = JaxkvCache(llama, max_tokens=64)
    with pytest.raises(ValueError, match=r"call crop\(3 - cache.get_seq_length\(\)\)"):
        cache.crop(3)
    config = transformers.Qwen3NextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=2,
        num_experts_per_tok=1, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    cache = JaxkvCache(model, max_tokens=64)
    ids, mask = prompts(1, 9)
    with pytest.raises(Unsupported, match="cannot take back tokens of recurrent layers"):
        cache.activate_past_recording()
    greedy(model, ids, mask, 1, past_key_values=cache)
    with pytest.raises(Unsupported, match="use DynamicCache for it, or fork"):
        cache.crop(-1)


@pytest.fixture
def copied(monkeypatch):
    """The page copies that caches made."""
    made, copy = [], Store.copy
    monkeypatch.setattr(
        Store,
        "copy",
        lambda self, lease, copies: (made.extend(copies), copy(self, lease, copies))[1],
    )
    return made


def test_beams_copy_no_page_but_the_last_one_and_only_where_two_go_on(llama, copied):
    """After a reorder, each source row's partial page is copied once less than rows go on from it."""
    ids, _ = prompts(3, 22)
    cache = JaxkvCache(llama, max_tokens=256, page_size=4)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
    free = cache._store.allocator.num_free("gqa")
    before = cache._sequences.rows
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    after = cache._sequences.rows
    # Two rows go on as they are, one is new, and the row that no beam chose is gone.
    assert [after[0], after[1]] == [before[2], before[0]]
    assert not cache._store.allocator.is_open(before[1].number)
    assert copied == []
    assert cache._store.allocator.num_free("gqa") == free + 1
    with torch.no_grad():
        llama(ids[:, :1], past_key_values=cache)
    assert len(copied) == 1
    pages = [cache._store.allocator.pages(row.number, "gqa") for row in after]
    assert pages[0][:5] == pages[2][:5]
    assert {copied[0].source, copied[0].target} == {pages[0][5], pages[2][5]}
    check(cache)


def test_beams_that_end_at_a_page_copy_nothing(llama, copied):
    ids, _ = prompts(2, 20)
    cache = JaxkvCache(llama, max_tokens=256, page_size=4)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    one = torch.cat([ids, ids], 1)[:, :1].repeat_interleave(2, 0)
    with torch.no_grad():
        got = llama(one, past_key_values=cache).logits[:, -1]
    assert copied == []
    whole = torch.cat([ids.repeat_interleave(2, 0), one], 1)
    torch.testing.assert_close(got, last_logits(llama, whole)[:, 0], rtol=0, atol=1e-5)


def test_beam_search_copies_at_most_one_page_a_step_for_each_beam(llama, copied):
    ids, mask = prompts(2, 19, (3, 0))
    cache = JaxkvCache(llama, max_tokens=512, page_size=4)
    options = {"num_beams": 4, "num_return_sequences": 3}
    wanted = greedy(llama, ids, mask, 12, **options)
    assert torch.equal(greedy(llama, ids, mask, 12, past_key_values=cache, **options), wanted)
    # Each prompt keeps one of its four beams without a copy, in each of 11 steps after the first token.
    assert 0 < len(copied) <= 2 * 3 * 11
    check(cache)
