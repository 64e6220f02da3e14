"""The replayed forward on a model: shared by its caches, removed with the last, copied and wrapped like the model's."""

import copy
import gc
import inspect
import pickle
import types
import weakref

import pytest
import torch

from tests.torch_bridge.tiny import prompts, tiny_model
from torch_bridge.graphs.replayed_forward import ReplayedForward, install
from torch_bridge.transformers_cache.fingerprint import KnownModel

pytestmark = pytest.mark.torch


@pytest.fixture
def llama():
    return tiny_model("llama", num_hidden_layers=1)


class Replays:
    """Stands for a cache that replays each forward."""

    def replay(self, arguments, forward):
        return "replayed", sorted(arguments), forward


def test_caches_share_one_and_the_last_removes_it(llama):
    signature = inspect.signature(llama.forward)
    first, second = install(llama), install(llama)
    held = vars(llama)["forward"]
    assert inspect.signature(llama.forward) == signature
    first()
    assert vars(llama)["forward"] is held
    second()
    assert "forward" not in vars(llama)


def test_only_a_forward_with_a_cache_that_replays_is_replayed(llama):
    ids, _ = prompts(1, 5)
    wanted = llama(ids).logits
    undo = install(llama)
    assert torch.equal(llama(ids).logits, wanted)
    said, names, forward = llama.forward(input_ids=ids, past_key_values=Replays())
    assert (said, names) == ("replayed", ["input_ids", "past_key_values"])
    assert torch.equal(forward(ids).logits, wanted)
    undo()


def test_a_forward_on_the_instance_is_called_and_put_back(llama):
    calls = []
    plain = llama.forward

    def own(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    llama.forward = own
    undo = install(llama)
    llama(prompts(1, 5)[0])
    assert calls == [1]
    undo()
    assert llama.forward is own


def test_who_wraps_it_keeps_it(llama):
    undo = install(llama)
    inner = llama.forward
    llama.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    outer = llama.forward
    undo()
    assert llama.forward is outer
    ids, _ = prompts(1, 5)
    assert torch.equal(llama(ids).logits, tiny_model("llama", num_hidden_layers=1)(ids).logits)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_computes_with_its_own_weights(llama, twin_of):
    install(llama)
    ids, _ = prompts(1, 5)
    wanted = llama(ids).logits
    twin = twin_of(llama)
    with torch.no_grad():
        llama.lm_head.weight.zero_()
    assert torch.equal(twin(ids).logits, wanted)
    undo = install(twin)
    assert isinstance(vars(twin)["forward"], ReplayedForward)
    undo()
    assert "forward" not in vars(twin)


def test_a_copy_is_not_bound_to_a_forward_that_was_bound_to_the_model(llama):
    kind = type(llama)
    llama.forward = types.MethodType(lambda model, ids: kind.forward(model, ids), llama)
    install(llama)
    ids, _ = prompts(1, 5)
    wanted = llama(ids).logits
    twin = copy.deepcopy(llama)
    with torch.no_grad():
        llama.lm_head.weight.zero_()
    assert torch.equal(twin(ids).logits, wanted)


def test_it_does_not_keep_the_model_alive(llama):
    model = tiny_model("llama", num_hidden_layers=1)
    undo, gone = install(model), weakref.ref(model)
    gc.collect()
    gc.disable()
    del model
    gc.enable()
    assert gone() is None
    undo()


def test_the_fingerprint_and_the_structure_are_the_same_with_it(llama):
    before = KnownModel(llama).begin_fingerprint()(), KnownModel(llama).structure()
    undo = install(llama)
    assert (KnownModel(llama).begin_fingerprint()(), KnownModel(llama).structure()) == before
    undo()
    assert (KnownModel(llama).begin_fingerprint()(), KnownModel(llama).structure()) == before
    llama.forward = lambda *args: None
    changed = KnownModel(llama).structure()
    undo = install(llama)
    assert KnownModel(llama).structure() == changed != before[1]
    undo()


def test_the_structure_is_that_of_attributes_and_addresses_not_of_values(llama):
    before = KnownModel(llama).structure()
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    assert KnownModel(llama).structure() == before
    llama.lm_head.weight.data = llama.lm_head.weight.data.clone()
    moved = KnownModel(llama).structure()
    assert moved != before
    llama.model.layers[0].self_attn.scaling = 0.3
    assert KnownModel(llama).structure() != moved


def test_the_structure_keeps_what_it_compares_by_identity(llama):
    mlp = llama.model.layers[0].mlp
    mlp.forward, mlp.table = (lambda x: x), [torch.ones(2)]
    kept = weakref.ref(mlp.forward), weakref.ref(mlp.table[0])
    before = KnownModel(llama).structure()
    del mlp.forward, mlp.table
    gc.collect()
    assert None not in [one() for one in kept]
    assert KnownModel(llama).structure() != before
