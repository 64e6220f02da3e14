"""Fused forwards: the results of the modules' own, where they are used, and what they leave alone.

Triton's interpreter runs the kernels on the CPU. Its bfloat16 is not rounded as on a GPU, so models are in float16.
"""

import copy
import importlib.util
import pickle

import pytest
import torch

from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.fused import checked

pytest.importorskip("triton")
pytestmark = pytest.mark.torch


@pytest.fixture
def forwards(monkeypatch):
    """Returns the module of fused forwards, on the CPU, with a list of the kernels that ran."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from torch_bridge.fused import forwards, install, kernels

    spec = importlib.util.spec_from_file_location("interpreted_kernels", kernels.__file__)
    interpreted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreted)
    ran = []
    for name in ("norm", "add_and_norm", "rotate", "gate"):
        plain = getattr(interpreted, name)
        monkeypatch.setattr(
            interpreted,
            name,
            lambda *args, plain=plain, name=name: ran.append(name) or plain(*args),
        )
    monkeypatch.setattr(forwards, "kernels", interpreted)
    monkeypatch.setattr(forwards, "_runs_on", lambda device: True)
    monkeypatch.setattr(checked, "_FOUND", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.install_fused",
        lambda model, device: install._FUSED.use(model),
    )
    forwards.ran = ran
    return forwards


def scaled(hidden):
    """Changes a layer's input in place."""
    hidden.mul_(-2)


def half(family="llama"):
    model = tiny_model(family).to(torch.float16)
    model.set_attn_implementation("jaxkv")
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_with_kernels_give_the_logits_of_the_modules_own(forwards, monkeypatch, family):
    model = half(family)
    ids, mask = prompts(2, 9, (3, 0))
    said = {}
    for is_on in (False, True):
        monkeypatch.setattr(forwards, "IS_ON", is_on)
        cache = JaxkvCache(model, max_tokens=64)
        options = {"output_logits": True, "return_dict_in_generate": True}
        said[is_on] = greedy(model, ids, mask, 4, past_key_values=cache, **options)
        assert bool(forwards.ran) is is_on
        check(cache)
    assert checked.why_not_fused() is None
    assert torch.equal(said[True].sequences, said[False].sequences)
    for found, wanted in zip(said[True].logits, said[False].logits, strict=True):
        torch.testing.assert_close(found, wanted, rtol=4e-3, atol=4e-3)
    # Per step: Llama's sums and the norms that read them are one; Gemma's norms are per head too, and read no sums.
    sums, norms = (0, 13) if family == "gemma3" else (4, 1)
    per_step = {"norm": norms, "add_and_norm": sums, "rotate": 2, "gate": 2}
    checks = {"norm": 2 - (sums > 0), "add_and_norm": int(sums > 0), "rotate": 1, "gate": 1}
    assert {name: forwards.ran.count(name) for name in per_step} == {
        name: 3 * count + checks[name] for name, count in per_step.items()
    }


def test_a_kernel_with_other_results_is_not_used_and_the_reason_is_kept(forwards, monkeypatch):
    model = half()
    ids, mask = prompts(1, 9)
    wanted = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    checked._FOUND.clear()
    wrong = {"norm": 1.02, "gate": 1.02}
    for name, factor in wrong.items():
        plain = getattr(forwards.kernels, name)
        monkeypatch.setattr(forwards.kernels, name, lambda *args, p=plain, f=factor: p(*args) * f)

    def refuse(*tensors):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(forwards.kernels, "rotate", refuse)
    said = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    assert torch.equal(said, wanted)
    reasons = checked.why_not_fused()
    assert "norm LlamaRMSNorm has other results" in reasons
    assert "gate SiLUActivation has other results" in reasons
    assert "rotation apply_rotary_pos_emb failed: RuntimeError: no compiler" in reasons


def test_hooks_subclasses_and_replaced_forwards_are_called(forwards):
    class Louder(type(half().model.norm)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model = half()
    calls = []
    first, second = model.model.layers
    first.mlp.act_fn.register_forward_hook(lambda *call: calls.append("activation"))
    first.input_layernorm.register_forward_hook(lambda *call: calls.append("norm"))
    plain = second.mlp.forward
    second.mlp.forward = lambda x: calls.append("mlp") or plain(x)
    second.input_layernorm.__class__ = Louder
    second.post_attention_layernorm.register_forward_hook(lambda *call: calls.append("sum"))
    ids, mask = prompts(1, 9)
    model.set_attn_implementation("sdpa")
    wanted = greedy(model, ids, mask, 3)
    model.set_attn_implementation("jaxkv")
    calls.clear()
    cache = JaxkvCache(model, max_tokens=64)
    assert "forward" not in vars(second.input_layernorm)
    said = greedy(model, ids, mask, 3, past_key_values=cache)
    assert torch.equal(said, wanted)
    assert [calls.count(name) for name in ("activation", "norm", "mlp", "sum")] == [3] * 4


def test_a_sum_that_changes_in_place_gets_a_new_norm(forwards):
    model = half()
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: scaled(args[0]))
    ids, mask = prompts(1, 9)
    model.set_attn_implementation("sdpa")
    wanted = greedy(model, ids, mask, 4)
    model.set_attn_implementation("jaxkv")
    said = greedy(model, ids, mask, 4, past_key_values=JaxkvCache(model, max_tokens=64))
    assert torch.equal(said, wanted)
    assert "add_and_norm" in forwards.ran


def test_forwards_without_a_cache_prompts_and_other_dtypes_run_the_modules_own(forwards):
    ids, mask = prompts(1, 9)
    model = half()
    cache = JaxkvCache(model, max_tokens=64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    greedy(model, ids, mask, 3)
    wide = tiny_model()
    wide.set_attn_implementation("jaxkv")
    greedy(wide, ids, mask, 3, past_key_values=JaxkvCache(wide, max_tokens=64))
    assert forwards.ran == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_they_go_with_the_last_cache_and_copies_have_their_own(forwards, copied):
    model = half()
    caches = [JaxkvCache(model, max_tokens=64) for _ in range(2)]
    norm = model.model.norm
    assert isinstance(vars(norm)["forward"], forwards.FusedNorm)
    twin = copied(model)
    assert vars(twin.model.norm)["forward"].module() is twin.model.norm
    caches.pop()
    assert "forward" in vars(norm)
    caches.pop()
    assert "forward" not in vars(norm)
    cache = JaxkvCache(twin, max_tokens=64)
    del cache
    assert not any("forward" in vars(module) for module in twin.modules())
