"""Models with sinks and windows on a GPU: no attention through XLA, and the tokens of Transformers' attention."""

import pytest
import torch

from tests.torch_bridge.tiny import greedy, prompts
from tests.torch_bridge.transformers_cache.families import FAMILIES, model_of
from torch_bridge import JaxkvCache
from torch_bridge.transformers_cache import attention

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def on_gpu(family, **more):
    """Returns a model in bfloat16 whose heads have the sizes of the kernels, with experts that a graph can record."""
    model = model_of(family, head_dim=64, num_attention_heads=8, **more).to("cuda", torch.bfloat16)
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "cohere2", "mixtral"])
def test_prefill_and_decode_run_without_xla(family, graphs, monkeypatch):
    """Prompts with padding, a second chunk of several tokens, and decode steps; against the same pages through XLA."""
    model = on_gpu(family)
    model.set_attn_implementation("jaxkv")
    ids, mask = (one.cuda() for one in prompts(3, 40, (3, 0, 12)))
    more, ones = (one.cuda() for one in prompts(3, 9, seed=4))

    def logits(cache):
        said = greedy(model, ids, mask, 6, past_key_values=cache)
        text = torch.cat([ids, said[:, 40:45], more], 1)
        shown = torch.cat([mask, ones[:, :5], ones], 1)
        out = greedy(
            model,
            text,
            shown,
            8,
            past_key_values=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences, torch.stack(out.logits)

    with monkeypatch.context() as patch:
        patch.setattr("torch_bridge.ops.direct.IS_ON", False)
        wanted = logits(JaxkvCache(model, max_tokens=512, graphs=False))
    run = attention.run
    through_xla = []
    monkeypatch.setattr(
        attention, "run", lambda *a, **k: (through_xla.append(a[0]), run(*a, **k))[1]
    )
    cache = JaxkvCache(model, max_tokens=512, graphs=graphs)
    got = logits(cache)
    assert through_xla == []
    torch.testing.assert_close(got[1][0], wanted[1][0], rtol=3e-2, atol=3e-2)
    assert torch.equal(got[0][:, :55], wanted[0][:, :55])
    if graphs:
        assert cache.stats().steps_replayed > 0, cache.stats().why_not_replayed


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_on_a_gpu_are_those_of_transformers(family):
    model = model_of(family).cuda()
    ids, mask = (one.cuda() for one in prompts(2, 21, (4, 0)))
    cache = JaxkvCache(model, max_tokens=256)
    wanted = greedy(model, ids, mask, 9)
    assert torch.equal(greedy(model, ids, mask, 9, past_key_values=cache), wanted)
    assert torch.equal(
        greedy(model, ids[1:], mask[1:], 9, prompt_lookup_num_tokens=3),
        greedy(
            model, ids[1:], mask[1:], 9, past_key_values=cached(model), prompt_lookup_num_tokens=3
        ),
    )


def cached(model):
    return JaxkvCache(model, max_tokens=256)
