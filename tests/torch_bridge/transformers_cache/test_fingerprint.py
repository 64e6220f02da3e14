"""Cached prefixes after a change of the model: keys of the previous weights are never reused."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.transformers_cache.fingerprint import KnownModel

pytestmark = pytest.mark.torch


class Lora(torch.nn.Module):
    """A linear layer with an adapter, as PEFT's: merged into the weight, scaled, switched off."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)
        self.scaling = {"default": 0.5}
        self.disabled = False

    def forward(self, x):
        out = self.base(x)
        return out if self.disabled else out + self.scaling["default"] * self.up(self.down(x))

    def merge(self):
        self.base.weight.data += self.scaling["default"] * (self.up.weight @ self.down.weight)
        self.disabled = True


@dataclass
class Factor:
    value: float


class Shifted(torch.nn.Module):
    """A linear layer whose output is shifted by tensors and scaled by numbers, each held in another way."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.register_buffer("shift", torch.zeros(base.out_features), persistent=False)
        self.plain = torch.zeros(base.out_features)
        self.listed = [torch.zeros(base.out_features)]
        self.factor = Factor(1.0)
        self.namespace = SimpleNamespace(factor=1.0)
        self.array = np.ones(1)

    def forward(self, x):
        factor = self.factor.value * self.namespace.factor * float(self.array[0])
        return factor * (self.base(x) + self.shift + self.plain + self.listed[0])


def attention(model):
    return model.model.layers[0].self_attn


def key_weight(model):
    return attention(model).k_proj.weight


def replace_module(model):
    attention(model).k_proj = torch.nn.Linear(32, 32, bias=False)


def hook_hidden_states(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)


def replace_forward(model):
    layer = model.model.layers[0]
    layer.forward = functools.partial(
        lambda old, *args, **kw: old(*args, **kw) * 1.5, layer.forward
    )


def load(model):
    model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()})


def write_one_element_of_many(model):
    model.get_input_embeddings().weight.data[5, 7] += 3


def write_through_numpy(model):
    key_weight(model).detach().numpy()[:] *= 1.5


def keep_the_version(model):
    """Writes as inference mode does, which counts no versions."""
    weight = key_weight(model)
    with torch.inference_mode():
        weight.data.mul_(-1)


CHANGES = {
    "data +=": lambda model: key_weight(model).data.add_(torch.randn(32, 32)),
    "data.mul_": lambda model: key_weight(model).data.mul_(1.5),
    "data.neg_": lambda model: key_weight(model).data.neg_(),
    "data.copy_ of its own rows in another order": lambda model: key_weight(model).data.copy_(
        key_weight(model).flip(0)
    ),
    "_foreach": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 1.5),
    "numpy": write_through_numpy,
    "inference mode": keep_the_version,
    "one element": write_one_element_of_many,
    "load_state_dict": load,
    "merge": lambda model: attention(model).v_proj.merge(),
    "scaling": lambda model: attention(model).v_proj.scaling.update(default=5.0),
    "switched off": lambda model: setattr(attention(model).v_proj, "disabled", True),
    "buffer": lambda model: attention(model).o_proj.shift.add_(1),
    "buffer's data": lambda model: attention(model).o_proj.shift.data.add_(1),
    "tensor attribute": lambda model: attention(model).o_proj.plain.data.add_(1),
    "listed tensor": lambda model: attention(model).o_proj.listed[0].data.add_(1),
    "dataclass": lambda model: setattr(attention(model).o_proj.factor, "value", 5.0),
    "namespace": lambda model: setattr(attention(model).o_proj.namespace, "factor", 5.0),
    "NumPy array": lambda model: attention(model).o_proj.array.fill(5),
    "attribute": lambda model: (
        setattr(model.model.norm, "variance_epsilon", 3.0)
        or setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 3.0)
    ),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 3.0),
    "module": replace_module,
    "hook": hook_hidden_states,
    "forward": replace_forward,
}


@pytest.fixture
def model():
    model = tiny_model("llama")
    attention(model).v_proj = Lora(attention(model).v_proj)
    attention(model).o_proj = Shifted(attention(model).o_proj)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_no_key_of_the_model_before_a_change_is_reused(model, change):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 1, past_key_values=cache)
    cache.reset()
    CHANGES[change](model)
    wanted = greedy(model, ids, mask, 6)
    assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0
    check(cache)


def rename_an_attribute(model):
    own = vars(attention(model))
    own["other"] = own.pop("scaling")


def turn_the_hooks_round(model):
    hooks = model.model.norm._forward_hooks
    hooks.move_to_end(next(iter(hooks)))


def replace_the_attributes(model):
    norm = model.model.norm
    vars(norm).update(vars(norm) | {"variance_epsilon": 3.0})
    norm.__dict__ = dict(vars(norm))


OTHERS = {
    "dtype": lambda model: model.to(torch.float64),
    "other tensor": lambda model: setattr(
        attention(model).k_proj, "weight", torch.nn.Parameter(key_weight(model).detach() * 2)
    ),
    "data of another dtype": lambda model: setattr(
        key_weight(model), "data", key_weight(model).data.half()
    ),
    "data of another shape": lambda model: setattr(
        key_weight(model), "data", key_weight(model).data.view(16, 64)
    ),
    "training mode": lambda model: model.model.train(),
    "class": lambda model: setattr(model.model.norm, "__class__", torch.nn.Identity),
    "listed": lambda model: attention(model).o_proj.listed.append(1.5),
    "renamed": rename_an_attribute,
    "order of hooks": turn_the_hooks_round,
    "attributes": replace_the_attributes,
    "attention": lambda model: model.set_attn_implementation("eager"),
    "removed": lambda model: delattr(attention(model), "scaling"),
}
COMPARED = CHANGES | OTHERS


@pytest.mark.parametrize("change", [name for name in COMPARED if name != "NumPy array"])
def test_a_walk_is_left_out_only_where_it_would_find_the_same(model, change):
    attention(model).o_proj.array = None
    for factor in (1.0, 2.0):
        model.model.norm.register_forward_hook(lambda *call, factor=factor: call[-1] * factor)
    known = KnownModel(model)
    before, where = known.begin_fingerprint()(), known.structure()
    reading = known._latest
    assert (known.begin_fingerprint()(), known.structure()) == (before, where)
    assert known._latest is reading
    COMPARED[change](model)
    fresh = KnownModel(model)
    assert known.begin_fingerprint()() == fresh.begin_fingerprint()() != before
    assert known.structure() == fresh.structure()


def test_no_key_is_reused_after_the_forward_of_a_class_was_replaced(model, monkeypatch):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 1, past_key_values=cache)
    cache.reset()
    old = Shifted.forward
    monkeypatch.setattr(Shifted, "forward", lambda self, x: 5 * old(self, x))
    wanted = greedy(model, ids, mask, 6)
    assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0


def test_prefixes_computed_after_a_change_are_reused(model):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    for factor in (1, -1):
        key_weight(model).data.mul_(factor)
        wanted = greedy(model, ids, mask, 6)
        for _ in range(2):
            assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
            cache.reset()
    assert cache.stats().tokens_reused == 64
    check(cache)


def test_a_merge_that_is_undone_before_the_next_prompt_costs_no_prefix(model):
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 3, past_key_values=cache)
    cache.reset()
    before = key_weight(model).detach().clone()
    key_weight(model).data.mul_(1.5)
    key_weight(model).data.copy_(before)
    greedy(model, ids, mask, 3, past_key_values=cache)
    assert cache.stats().tokens_reused == 32


def test_keys_of_a_merge_that_was_undone_within_a_row_are_no_prefix(model):
    """The second turn is computed under other weights, which are the first turn's again when the rows end."""
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    before = key_weight(model).detach().clone()
    said = greedy(model, ids, mask, 4, past_key_values=cache)
    longer = torch.cat([said, ids], 1)
    ones = torch.ones_like(longer)
    key_weight(model).data.mul_(-1)
    greedy(model, longer, ones, 4, past_key_values=cache)
    key_weight(model).data.copy_(before)
    cache.reset()
    wanted = greedy(model, longer, ones, 4)
    assert torch.equal(greedy(model, longer, ones, 4, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0


def test_another_cache_of_the_model_or_a_forward_changes_no_fingerprint(model):
    ids, mask = prompts(1, 40)
    known = KnownModel(model)
    before = known.begin_fingerprint()()
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 3, past_key_values=cache)
    greedy(model, ids, mask, 3)
    assert known.begin_fingerprint()() == before
    del cache
    assert known.begin_fingerprint()() == before


def test_tokens_after_the_first_read_no_weights_for_the_fingerprint(model, monkeypatch):
    read = []
    plain = KnownModel.begin_fingerprint
    monkeypatch.setattr(
        KnownModel, "begin_fingerprint", lambda known: read.append(known) or plain(known)
    )
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    greedy(model, ids, mask, 20, past_key_values=cache)
    assert len(read) == 1


def test_bits_are_those_when_a_fingerprint_begins_and_all_else_when_it_ends():
    model = tiny_model("llama")
    known = KnownModel(model)
    before = known.begin_fingerprint()()
    finish = known.begin_fingerprint()
    key_weight(model).data.neg_()
    assert finish() == before
    assert known.begin_fingerprint()() != before
    key_weight(model).data.neg_()
    for change in (OTHERS["other tensor"], CHANGES["config"], OTHERS["removed"]):
        finish = known.begin_fingerprint()
        change(model)
        assert finish() == KnownModel(model).begin_fingerprint()() != before


def test_what_cannot_be_read_is_never_the_same_twice():
    module = torch.nn.Module()
    module.register_buffer("held", torch.zeros(4, device="meta"))
    known = KnownModel(module)
    assert known.begin_fingerprint()() != known.begin_fingerprint()()
