"""Fused forwards: the results of the modules' own, where they are used, and what they leave alone.

Triton's interpreter runs the kernels on the CPU. Its bfloat16 is not rounded as on a GPU, so models are in float16.
"""

import copy
import importlib.util
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.fused import checked

pytest.importorskip("triton")
pytestmark = pytest.mark.torch


@pytest.fixture
def fused(monkeypatch):
    """Has the kernels run on the CPU; returns the modules of them, and a list of the kernels that ran."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from torch_bridge.fused import forwards, fused_forward, install, kernels, linear, products

    ran = []

    def interpreted(module, *names):
        spec = importlib.util.spec_from_file_location("interpreted", module.__file__)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        for name in names:
            plain = getattr(made, name)
            counted = lambda *args, plain=plain, name=name: ran.append(name) or plain(*args)  # noqa: E731
            monkeypatch.setattr(made, name, counted)
        return made

    names = ("norm", "add_and_norm", "rotate", "gate")
    monkeypatch.setattr(forwards, "kernels", interpreted(kernels, *names))
    monkeypatch.setattr(linear, "products", interpreted(products, "products"))
    monkeypatch.setattr(fused_forward, "_runs_on", lambda device: True)
    monkeypatch.setattr(checked, "_FOUND", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.install_fused",
        lambda model, device: install._FUSED.use(model),
    )
    return SimpleNamespace(
        ran=ran, kernels=forwards.kernels, products=linear.products, switch=fused_forward
    )


def scaled(hidden):
    """Changes a layer's input in place."""
    hidden.mul_(-2)


def half(family="llama", **more):
    model = tiny_model(family, **more).to(torch.float16)
    model.set_attn_implementation("jaxkv")
    return model


# Gemma 3 has more norms, by the same kernel.
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_steps_with_kernels_give_the_logits_of_the_modules_own(fused, monkeypatch, family):
    model = half(family)
    ids, mask = prompts(2, 9, (3, 0))
    said = {}
    for is_on in (False, True):
        monkeypatch.setattr(fused.switch, "IS_ON", is_on)
        cache = JaxkvCache(model, max_tokens=64)
        options = {"output_logits": True, "return_dict_in_generate": True}
        said[is_on] = greedy(model, ids, mask, 4, past_key_values=cache, **options)
        assert bool(fused.ran) is is_on
        check(cache)
    assert checked.why_not_fused() is None
    assert torch.equal(said[True].sequences, said[False].sequences)
    for found, wanted in zip(said[True].logits, said[False].logits, strict=True):
        torch.testing.assert_close(found, wanted, rtol=4e-3, atol=4e-3)
    # Per step: Llama's sums and the norms that read them are one; Gemma's norms are per head too, and read no sums.
    sums, norms = (0, 13) if family == "gemma3" else (4, 1)
    per_step = {"norm": norms, "add_and_norm": sums, "rotate": 2, "gate": 2, "products": 0}
    checks = {
        "norm": 2 - (sums > 0),
        "add_and_norm": int(sums > 0),
        "rotate": 1,
        "gate": 1,
        "products": 0,
    }
    assert {name: fused.ran.count(name) for name in per_step} == {
        name: 3 * count + checks[name] for name, count in per_step.items()
    }


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_projections_of_one_tensor_are_one_kernel_with_torchs_results(fused, rows):
    from torch_bridge.fused.linear import _is_product

    torch.manual_seed(0)
    # The interpreter takes two outputs of one row at a time, and 64 of several.
    sizes, width = ((12, 6, 8) if rows == 1 else (128, 64, 64)), 256
    weights = [torch.randn(size, width).to(torch.float16) for size in sizes]
    x = torch.randn(rows, 1, width).to(torch.float16)
    for count in (1, 2, 3):
        if fused.products.is_faster(rows, width, sizes[:count]):
            found = fused.products.products(x, weights[:count])
            for one, weight in zip(found, weights, strict=False):
                assert one.shape == (rows, 1, len(weight))
                wanted = torch.nn.functional.linear(x, weight)
                torch.testing.assert_close(one, wanted, rtol=2e-3, atol=2e-3)
                assert _is_product(one[:, 0], x[:, 0], weight)
                assert not _is_product(one[:, 0] + 0.1, x[:, 0], weight)
    assert fused.products.is_faster(rows, width, sizes[:1]) is (rows == 1)
    assert not fused.products.is_faster(33, width, (128, 64, 64))
    assert not fused.products.is_faster(2, width, (96, 64))


@pytest.mark.slow
def test_one_row_takes_four_kernels_for_seven_projections(fused, monkeypatch):
    model = half()
    ids, mask = prompts(1, 9)
    monkeypatch.setattr(fused.switch, "IS_ON", False)
    wanted = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    monkeypatch.setattr(fused.switch, "IS_ON", True)
    calls = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: calls.append(1))
    said = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    assert torch.equal(said, wanted)
    assert len(calls) == 3
    # Four sizes of products are compared first.
    assert fused.ran.count("products") == 4 + 2 * 2 * 4
    fused.ran.clear()
    model.model.layers[0].self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(32).half())
    greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    # Without that group, q and v are alone, which are two sizes more.
    assert fused.ran.count("products") == 2 + 2 * (2 * 4 + 1)


@pytest.mark.slow
def test_a_kernel_with_other_results_is_not_used_and_the_reason_is_kept(fused, monkeypatch):
    model = half()
    ids, mask = prompts(1, 9)
    wanted = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    checked._FOUND.clear()
    wrong = {"norm": 1.02, "gate": 1.02}
    for name, factor in wrong.items():
        plain = getattr(fused.kernels, name)
        monkeypatch.setattr(fused.kernels, name, lambda *args, p=plain, f=factor: p(*args) * f)

    def refuse(*tensors):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused.kernels, "rotate", refuse)
    said = greedy(model, ids, mask, 3, past_key_values=JaxkvCache(model, max_tokens=64))
    assert torch.equal(said, wanted)
    reasons = checked.why_not_fused()
    assert "norm LlamaRMSNorm has other results" in reasons
    assert "gate SiLUActivation has other results" in reasons
    assert "rotation apply_rotary_pos_emb failed: RuntimeError: no compiler" in reasons


def test_hooks_subclasses_and_replaced_forwards_are_called(fused):
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
    ids, mask = prompts(2, 9)
    model.set_attn_implementation("sdpa")
    wanted = greedy(model, ids, mask, 3)
    model.set_attn_implementation("jaxkv")
    calls.clear()
    cache = JaxkvCache(model, max_tokens=64)
    assert "forward" not in vars(second.input_layernorm)
    said = greedy(model, ids, mask, 3, past_key_values=cache)
    assert torch.equal(said, wanted)
    assert [calls.count(name) for name in ("activation", "norm", "mlp", "sum")] == [3] * 4


def test_a_forward_that_replaces_that_of_a_class_is_called(fused, monkeypatch):
    from torch_bridge.fused.forwards import kind_of

    model = half()
    layer = model.model.layers[0]
    modules = layer, layer.mlp, layer.input_layernorm
    assert None not in map(kind_of, modules)
    cache = JaxkvCache(model, max_tokens=64)
    monkeypatch.setattr(fused.switch, "_is_wanted", lambda: True)
    for module in modules:
        monkeypatch.setattr(type(module), "forward", lambda self, x: x + 7)
    given = torch.ones(2, 1, 32, dtype=torch.float16)
    assert all(torch.equal(module(given), given + 7) for module in modules)
    assert fused.ran == []
    del cache
    assert [kind_of(module) for module in modules] == [None] * 3


@pytest.mark.slow
def test_a_sum_that_changes_in_place_gets_a_new_norm(fused):
    model = half()
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: scaled(args[0]))
    ids, mask = prompts(1, 9)
    model.set_attn_implementation("sdpa")
    wanted = greedy(model, ids, mask, 4)
    model.set_attn_implementation("jaxkv")
    said = greedy(model, ids, mask, 4, past_key_values=JaxkvCache(model, max_tokens=64))
    assert torch.equal(said, wanted)
    assert "add_and_norm" in fused.ran


def test_tensors_that_a_caller_gets_hold_nothing_of_the_model(fused):
    model = half(num_hidden_layers=1)
    cache = JaxkvCache(model, max_tokens=64)
    ids, _ = prompts(1, 9)
    seen = []
    for norm in (model.model.layers[0].input_layernorm, model.model.norm):
        norm.register_forward_hook(lambda norm, args, out: seen.extend([*args, out]))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        out = model(ids[:, :1], past_key_values=cache, output_hidden_states=True)
    assert {"add_and_norm", "products"} <= set(fused.ran)
    assert not any(vars(one) for one in (*out.hidden_states, *seen))


def test_forwards_without_a_cache_prompts_and_other_dtypes_run_the_modules_own(fused):
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
    assert fused.ran == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_they_go_with_the_last_cache_and_copies_have_their_own(fused, copied):
    model = half()
    caches = [JaxkvCache(model, max_tokens=64) for _ in range(2)]
    norm = model.model.norm
    assert isinstance(vars(norm)["forward"], fused.switch.FusedForward)
    twin = copied(model)
    assert vars(twin.model.norm)["forward"].module() is twin.model.norm
    caches.pop()
    assert "forward" in vars(norm)
    caches.pop()
    assert "forward" not in vars(norm)
    cache = JaxkvCache(twin, max_tokens=64)
    del cache
    assert not any("forward" in vars(module) for module in twin.modules())
