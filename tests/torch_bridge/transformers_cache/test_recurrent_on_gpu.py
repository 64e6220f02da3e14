"""Models with recurrent layers on a GPU: tokens equal Transformers' own, from kept states and across leases too."""

import pytest
import torch

from tests.torch_bridge.tiny import check, greedy, prompts
from tests.torch_bridge.tiny_recurrent import WIDE, cache_name, recurrent_model
from torch_bridge import JaxkvCache, lease

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
FAMILIES = ("Mamba2", "Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH", "Qwen3Next", "Lfm2")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_own_cache(family):
    model = recurrent_model(family).cuda()
    cache = JaxkvCache(model, max_tokens=512, page_size=16)
    name = cache_name(model)
    for pads in ((4, 1), ()):
        ids, mask = (one.cuda() for one in prompts(2, 19, pads))
        wanted = greedy(model, ids, mask, 9)
        assert torch.equal(greedy(model, ids, mask, 9, **{name: cache}), wanted)
        cache.reset()
    with lease(cache) as views:
        assert all(
            torch.isfinite(view).all() for view in views.values() if view.is_floating_point()
        )
        views.commit()
    longer = torch.cat([wanted, prompts(2, 5, seed=3)[0].cuda()], 1)
    shown = torch.ones_like(longer)
    again = greedy(model, longer, shown, 6, **{name: cache})
    assert torch.equal(again, greedy(model, longer, shown, 6))
    assert cache.stats().tokens_reused == 2 * 27
    child = cache.fork()
    cache.reset()
    check(child)


@pytest.mark.parametrize("family", WIDE)
def test_replayed_steps_have_the_bits_of_ordinary_ones(family):
    model = recurrent_model(family, **WIDE[family]).to("cuda", torch.bfloat16)
    ids, mask = (one.cuda() for one in prompts(3, 19, (4, 0, 1)))
    options = {"output_logits": True, "return_dict_in_generate": True}
    caches = [JaxkvCache(model, max_tokens=512, graphs=graphs) for graphs in (False, True)]
    if caches[0].parts.store.layout.paged_groups:
        model.set_attn_implementation("jaxkv")
    for _ in range(2):
        told = []
        for cache in caches:
            named = {cache_name(model): cache}
            made = greedy(model, ids, mask, 9, **named, **options)
            longer = torch.cat([made.sequences, ids[:, :1]], 1)
            shown = torch.cat([mask, torch.ones(3, 10, dtype=mask.dtype, device="cuda")], 1)
            child = cache.fork()
            more = [
                greedy(model, longer, shown, 4, **{cache_name(model): one})
                for one in (child, cache)
            ]
            told.append([*made.logits, *more])
            child.reset()
            cache.reset()
        assert all(torch.equal(*pair) for pair in zip(*told, strict=True))
    assert caches[1].stats().why_not_replayed is None
    assert caches[1].stats().steps_replayed == 2 * (8 + 2 * 3)
    check(caches[1])
