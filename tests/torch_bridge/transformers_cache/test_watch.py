"""The hooks on a model: other threads, nested forwards, copies of the model, interrupts, dropped caches."""

import copy
import pickle
import threading

import pytest
import torch

from jaxkv.errors import CachePoisoned
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch


@pytest.fixture
def llama():
    return tiny_model("llama")


def inside_of_its_forwards(model, function):
    """Calls a function in the middle of each forward of this thread that no such call makes itself."""
    here, busy = threading.get_ident(), []

    def hook(module, args):
        if threading.get_ident() == here and not busy:
            busy.append(True)
            try:
                function()
            finally:
                busy.clear()

    return model.model.layers[1].register_forward_pre_hook(hook)


def in_a_thread(function):
    """Returns a function that calls another in a thread of its own, and raises what that raises."""

    def call():
        raised = []

        def run():
            try:
                function()
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return call


@pytest.mark.parametrize("where", [lambda function: function, in_a_thread])
@pytest.mark.parametrize("has_cache", [False, True])
def test_other_forwards_of_the_model_leave_the_one_on_its_way_alone(llama, where, has_cache):
    ids, mask = prompts(2, 12, (3, 0))
    others, shown = prompts(1, 7, seed=4)
    wanted, alone = greedy(llama, ids, mask, 4), greedy(llama, others, shown, 2)
    cache, second = JaxkvCache(llama, max_tokens=128), JaxkvCache(llama, max_tokens=128)
    got = []

    def other():
        second.reset(keep_prefix=False)
        options = {"past_key_values": second} if has_cache else {}
        got.append(greedy(llama, others, shown, 2, **options))

    hook = inside_of_its_forwards(llama, where(other))
    assert torch.equal(greedy(llama, ids, mask, 4, past_key_values=cache), wanted)
    hook.remove()
    assert len(got) == 4
    assert all(torch.equal(one, alone) for one in got)
    check(cache)


def test_a_second_thread_is_refused_and_the_first_goes_on(llama):
    ids, mask = prompts(1, 12)
    wanted = greedy(llama, ids, mask, 3)
    cache = JaxkvCache(llama, max_tokens=128)
    refused = []

    @in_a_thread
    def use():
        with pytest.raises(RuntimeError, match="another thread is in a forward with this cache"):
            llama(ids, past_key_values=cache)
        refused.append(True)

    hook = inside_of_its_forwards(llama, use)
    assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=cache), wanted)
    hook.remove()
    assert len(refused) == 3


def test_a_forward_inside_of_one_reads_no_pages_of_it(llama):
    ids, mask = prompts(1, 12)
    cache = JaxkvCache(llama, max_tokens=128)
    other = tiny_model("llama", seed=1)
    for model in (llama, other):
        model.set_attn_implementation("jaxkv")

    def use():
        with pytest.raises(ValueError, match="this forward has none"):
            other(ids)

    hook = inside_of_its_forwards(llama, use)
    got = greedy(llama, ids, mask, 3, past_key_values=cache)
    hook.remove()
    assert torch.equal(got, greedy(tiny_model("llama"), ids, mask, 3))


def test_a_forward_without_a_cache_reads_no_pages_of_an_interrupted_one(llama):
    ids, _ = prompts(1, 12)
    cache = JaxkvCache(llama, max_tokens=128)
    llama.set_attn_implementation("jaxkv")

    def interrupt():
        raise KeyboardInterrupt

    hook = inside_of_its_forwards(llama, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llama(ids, past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="this forward has none"):
        llama(ids)
    with pytest.raises(RuntimeError, match=r"reset\(\) first if that forward was interrupted"):
        cache.fork()
    del cache
    with pytest.raises(ValueError, match="this forward has none"):
        llama(ids)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_does_not_use_the_models_cache(llama, copied):
    ids, mask = prompts(1, 20)
    cache = JaxkvCache(llama, max_tokens=128)
    greedy(llama, ids, mask, 2, past_key_values=cache)
    cache.reset()
    twin = copied(llama)
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight.mul_(3)
    wanted = greedy(twin, ids, mask, 3)
    with pytest.raises(RuntimeError, match="outside of the forward of the model it was made for"):
        greedy(twin, ids, mask, 3, past_key_values=cache)
    own = JaxkvCache(twin, max_tokens=128)
    assert torch.equal(greedy(twin, ids, mask, 3, past_key_values=own), wanted)


def test_a_forward_whose_layers_drop_the_cache_is_refused(llama):
    ids, mask = prompts(1, 20)
    cache = JaxkvCache(llama, max_tokens=128)
    llama.gradient_checkpointing_enable()
    llama.train()
    with pytest.raises(RuntimeError, match=r"layers \[0, 1\] took no notice of the JaxkvCache"):
        llama(ids, past_key_values=cache)
    llama.eval()
    with pytest.raises(CachePoisoned):
        llama(ids, past_key_values=cache)
    cache.reset()
    wanted = greedy(llama, ids, mask, 3)
    assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=cache), wanted)


def test_a_layer_that_writes_twice_in_one_forward_is_refused(llama):
    ids, _ = prompts(1, 8)
    cache = JaxkvCache(llama, max_tokens=128)
    keys = torch.zeros(1, 2, 8, 16)
    hook = inside_of_its_forwards(llama, lambda: cache.update(keys, keys, 0))
    with torch.no_grad(), pytest.raises(ValueError, match="layer 0 updated the cache twice"):
        llama(ids, past_key_values=cache)
    hook.remove()


def test_a_model_in_another_dtype_than_its_cache_is_refused_before_anything_is_lost(llama):
    ids, mask = prompts(1, 8)
    cache = JaxkvCache(llama, max_tokens=128)
    said = greedy(llama, ids, mask, 2, past_key_values=cache)
    llama.to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"made for a model in torch\.float32 on cpu.*new JaxkvCache"
    ):
        greedy(llama, said, torch.ones_like(said), 2, past_key_values=cache)
    check(cache)


def test_a_cache_is_copied_by_forking_and_cannot_be_pickled(llama):
    ids, mask = prompts(1, 20)
    cache = JaxkvCache(llama, max_tokens=128)
    said = greedy(llama, ids, mask, 2, past_key_values=cache)
    twin = copy.copy(cache)
    wanted = greedy(llama, said, torch.ones_like(said), 3)
    for holder in (twin, cache):
        got = greedy(llama, said, torch.ones_like(said), 3, past_key_values=holder)
        assert torch.equal(got, wanted)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "jaxkv"])
def test_a_compiled_forward_gives_the_same_tokens(llama, attention, monkeypatch):
    ids, mask = prompts(2, 12, (3, 0))
    wanted = greedy(llama, ids, mask, 3)
    llama.set_attn_implementation(attention)
    torch._dynamo.reset()
    monkeypatch.setattr(llama, "forward", torch.compile(llama.forward, backend="eager"))
    cache = JaxkvCache(llama, max_tokens=128)
    assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=cache), wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("others", [1, 2])
def test_caches_that_come_and_go_while_a_forward_begins_leave_it_alone(llama, others):
    """As in another thread: torch has listed the hooks of the forward, and has not called all of them."""
    ids, mask = prompts(1, 12)
    wanted = greedy(llama, ids, mask, 3)
    caches, begun = [], []

    def come_and_go(module, args):
        begun.append(True)
        caches[1:] = [JaxkvCache(llama, max_tokens=64) for _ in range(others)]
        if len(begun) == 2:
            # Also the last one: a forward without a cache lists its hooks, which then go.
            caches.clear()

    llama.register_forward_pre_hook(come_and_go)
    caches.append(JaxkvCache(llama, max_tokens=128))
    caches.append(JaxkvCache(llama, max_tokens=64))
    hooks = len(llama._forward_pre_hooks)
    llama(ids, past_key_values=caches[0])
    assert caches[0].get_seq_length() == 12
    llama(ids)
    assert len(begun) == 2
    assert len(llama._forward_pre_hooks) == hooks - 1
    caches.append(JaxkvCache(llama, max_tokens=128))
    assert torch.equal(greedy(llama, ids, mask, 3, past_key_values=caches[0]), wanted)
