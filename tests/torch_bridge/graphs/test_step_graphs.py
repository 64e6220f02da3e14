"""Replayed decode steps: the tokens of Transformers, when a step is recorded again, and when it is not replayed."""

import copy
import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers

from jaxkv.cache.state import Cache
from jaxkv.errors import CachePoisoned
from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch


@pytest.fixture
def cache_of(monkeypatch):
    """Makes caches whose decode steps are frozen on the CPU. Prompts, which are slow to freeze, are not."""

    def make(model, **options):
        model.set_attn_implementation("jaxkv")
        return JaxkvCache(model, **{"max_tokens": 512, "graphs": True, **options})

    monkeypatch.setattr("torch_bridge.graphs.step_graphs.MOST_PROMPT_TOKENS", 0)
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
    )
    return make


def shallow(**more):
    return tiny_model("llama", num_hidden_layers=1, **more)


def test_one_frozen_step_serves_all_lengths_rows_forks_and_prefixes(cache_of):
    plain, model = tiny_model(), tiny_model()
    cache = cache_of(model, page_size=8)
    ids, mask = prompts(3, 21, (5, 0, 17))
    wanted = greedy(plain, ids, mask, 24)
    said = greedy(model, ids, mask, 24, past_key_values=cache)
    assert torch.equal(said, wanted)
    child = cache.fork()
    more, ones = prompts(3, 2, seed=6)
    shown = torch.cat([mask, torch.ones(3, 24, dtype=torch.long), ones], 1)
    longer = torch.cat([said, more], 1)
    for holder in (child, cache):
        wanted = greedy(plain, longer, shown, 9)
        assert torch.equal(greedy(model, longer, shown, 9, past_key_values=holder), wanted)
    cache.reset()
    ids[:, -1], mask[1, 3:5] = 7, 0
    wanted = greedy(plain, ids[1:], mask[1:], 12, num_beams=2)
    got = greedy(model, ids[1:], mask[1:], 12, num_beams=2, past_key_values=cache)
    assert torch.equal(got, wanted)
    stats = cache.stats()
    assert (stats.steps_replayed, stats.graphs_recorded, stats.graph_bytes) == (23 + 16 + 11, 1, 5)
    assert stats.why_not_replayed is stats.why_recorded_again is None
    assert stats.graph_seconds > 0
    check(cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_windows_norms_and_soft_caps_are_frozen_too(cache_of, family):
    ids, mask = prompts(3, 21, (5, 0, 17))
    wanted = greedy(tiny_model(family), ids, mask, 20)
    model = tiny_model(family)
    cache = cache_of(model)
    assert torch.equal(greedy(model, ids, mask, 20, past_key_values=cache), wanted)
    assert cache.stats().steps_replayed == 19


@pytest.mark.slow
def test_what_changes_the_model_or_moves_the_pool_is_recorded_again(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, _ = prompts(1, 12)
    reasons = []

    def follows(text=ids, count=4):
        """Generates and compares with the same model's ordinary forwards."""
        before = cache.stats()
        model.set_attn_implementation("sdpa")
        wanted = greedy(model, text, torch.ones_like(text), count)
        model.set_attn_implementation("jaxkv")
        got = greedy(model, text, torch.ones_like(text), count, past_key_values=cache)
        after = cache.stats()
        assert torch.equal(got, wanted)
        reasons.append(after.why_recorded_again)
        return got, after.graphs_recorded - before.graphs_recorded

    def anew():
        cache.reset(keep_prefix=False)
        return follows()[1]

    mlp = model.model.layers[0].mlp
    assert anew() == 1
    with torch.no_grad():
        mlp.up_proj.weight.mul_(-1)
    assert anew() == 0
    mlp.up_proj.weight = torch.nn.Parameter(-2 * mlp.up_proj.weight.detach())
    assert anew() == 1
    model.model.layers[0].self_attn.scaling = 0.9
    assert anew() == 1
    mlp.act_fn = torch.nn.Tanh()
    assert anew() == 1
    turn = jax.jit(
        lambda c: (Cache(arrays=tuple(a[::-1] for a in c.arrays), keys=c.keys), 0), donate_argnums=0
    )
    cache.reset(keep_prefix=False)
    said, _ = follows()
    for step, recorded in ((turn, 0), (lambda c: (jax.tree.map(jnp.copy, c), 0), 1)):
        for _ in range(2):
            cache.owner.run(step)
        said, count = follows(said)
        assert count == recorded
    texts = [reason.split(",")[0] for reason in dict.fromkeys(filter(None, reasons))]
    assert texts == [
        "parameters or buffers of the model were replaced or moved",
        "modules",
        "the pool has other addresses",
    ]
    check(cache)


def test_hooks_inside_are_called_and_recorded_once_they_are_gone(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    wanted = greedy(model, ids, mask, 6, past_key_values=cache)
    calls = []
    cache.reset(keep_prefix=False)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *call: calls.append(1))
    assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
    assert len(calls) == 6
    assert cache.stats().why_not_replayed == (
        "model.layers.0.mlp has hooks, which a graph would not call"
    )
    hook.remove()
    cache.reset(keep_prefix=False)
    assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
    assert len(calls) == 6
    assert cache.stats().why_not_replayed is None


def test_hooks_on_the_model_itself_are_called_around_replays(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    calls = []
    hook = model.register_forward_hook(lambda *call: calls.append(call[-1].logits.shape))
    greedy(model, ids, mask, 4, past_key_values=cache)
    hook.remove()
    assert len(calls) == 4
    assert cache.stats().steps_replayed == 3


def step(model, cache, ids, place, **more):
    """Computes one column of ids at a position."""
    positions = torch.full_like(ids, place)
    with torch.no_grad():
        return model(ids, position_ids=positions, past_key_values=cache, **more).logits


def test_what_wraps_the_forward_after_the_cache_was_made_runs_once_per_step(cache_of):
    model = shallow()
    cache = cache_of(model)
    plain = model.forward

    def louder(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits + 1
        return out

    model.forward = functools.wraps(plain)(louder)
    second = cache_of(model)
    ids, _ = prompts(1, 12)
    said = []
    for holder in (cache, second):
        with torch.no_grad():
            model(ids, past_key_values=holder)
        said.append(step(model, holder, ids[:, :1], 12))
    # The forward of the second cache goes with it, and its wrapper stays.
    del second, holder
    said.append(step(model, cache, ids[:, :1], 13))
    assert cache.stats().steps_replayed == 2
    other = shallow()
    theirs = cache_of(other, graphs=False)
    with torch.no_grad():
        other(ids, past_key_values=theirs)
    wanted = [step(other, theirs, ids[:, :1], place) + 1 for place in (12, 13)]
    torch.testing.assert_close(said, [wanted[0], *wanted], rtol=0, atol=1e-5)


def test_an_attribute_that_changes_between_two_recordings_is_followed_in_both(cache_of):
    model = shallow()
    cache, plain = cache_of(model), cache_of(model, graphs=False)
    attention = model.model.layers[0].self_attn
    ids, _ = prompts(2, 12)

    def follows(text):
        """Computes a text and a step, and compares with a cache without graphs."""
        said = []
        for holder in (cache, plain):
            holder.reset(keep_prefix=False)
            with torch.no_grad():
                model(text, past_key_values=holder)
            said.append(step(model, holder, text[:, :1], 12))
        torch.testing.assert_close(*said, rtol=0, atol=1e-5)

    follows(ids)
    cache.batch_select_indices(torch.tensor([0]))
    before, attention.scaling = attention.scaling, 5.0
    step(model, cache, ids[:1, :1], 13)
    attention.scaling = before
    follows(ids[:1])
    follows(ids)
    assert "attributes" in cache.stats().why_recorded_again


def scale(module, scaling):
    module.scaling = scaling


def steer(module, scaling):
    """Puts a closure on the module, which often gets the `id` of the one before."""
    vars(module).pop("forward", None)
    gc.collect()
    plain = type(module).forward
    module.forward = lambda *args, **kwargs: tuple(
        one if one is None else one * scaling for one in plain(module, *args, **kwargs)
    )


# The test above changes the scale too.
@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("turn", [pytest.param(scale, marks=pytest.mark.slow), steer])
def test_what_is_switched_where_a_text_goes_on_is_noticed_by_the_step(cache_of, turn, fork):
    model = shallow()
    attention = model.model.layers[0].self_attn
    ids, mask = prompts(1, 12)
    said = []
    for graphs in (True, False):
        turn(attention, 1.0)
        cache = cache_of(model, graphs=graphs)
        first = greedy(model, ids, mask, 5, past_key_values=cache)
        holder = cache.fork() if fork else cache
        turn(attention, 3.0)
        # Its first forward computes the one token that the cache has not seen.
        more = greedy(model, first, torch.ones_like(first), 8, past_key_values=holder)
        said.append(more)
        if graphs:
            assert "attributes" in cache.stats().why_recorded_again
            assert cache.stats().steps_replayed == 4 + 7
    assert torch.equal(*said)
    assert len(said[0][0].unique()) > 3


def test_replaced_weights_are_freed_at_the_next_prompt(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    greedy(model, ids, mask, 3, past_key_values=cache)
    old = weakref.ref(model.lm_head.weight)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    cache.reset(keep_prefix=False)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    gc.collect()
    assert old() is None
    assert "replaced or moved" in cache.stats().why_recorded_again


def test_an_argument_that_always_changes_makes_sixteen_recordings_at_most(cache_of):
    model = shallow()
    cache = cache_of(model)
    cache._graphs._recorder = Again()
    ids, _ = prompts(1, 12)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for number in range(20):
        step(model, cache, ids[:, :1], 12 + number, request_id=number)
    stats = cache.stats()
    assert (stats.graphs_recorded, stats.steps_replayed) == (16, 16)
    assert "one per value of request_id" in stats.why_not_replayed
    step(model, cache, ids[:, :1], 32, request_id=3)
    assert cache.stats().why_not_replayed is None
    step(model, cache, ids[:, :1], 33, request_id=True)
    assert cache.stats().why_not_replayed is not None


def test_a_forward_with_another_cache_inside_a_recording_runs_once_per_step(cache_of):
    model, inner = shallow(), shallow(seed=3)
    cache, other = cache_of(model), cache_of(inner)
    plain = model.model.norm.forward
    ids, _ = prompts(1, 12)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        inner(ids, past_key_values=other)

    def drafted(hidden):
        step(inner, other, ids[:, :1], other.get_seq_length())
        return plain(hidden)

    model.model.norm.forward = drafted
    for place in range(3):
        step(model, cache, ids[:, :1], 12 + place)
    assert other.get_seq_length() == 12 + 3
    assert "inside another's decode step" in cache.stats().why_not_replayed
    assert other.stats().steps_replayed == 3
    check(cache)
    check(other)


def test_outputs_are_not_overwritten_by_later_steps(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(2, 12)
    options = {"output_logits": True, "return_dict_in_generate": True}
    wanted = greedy(shallow(), ids, mask, 6, **options).logits
    got = greedy(model, ids, mask, 6, past_key_values=cache, **options).logits
    assert cache.stats().steps_replayed == 5
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


REASONS = {
    "output_hidden_states": ({"output_hidden_states": True}, "the call has output_hidden_states"),
    "labels": ({"labels": torch.ones(1, 1, dtype=torch.long)}, "the call has the argument labels"),
    "positions": (
        {"position_ids": torch.full((3, 1, 1), 12)},
        "position_ids must be whole numbers",
    ),
    "logits": ({"logits_to_keep": torch.tensor([0])}, "the call has the argument logits_to_keep"),
    "no positions": ({}, "the call has no position_ids"),
}


@pytest.mark.parametrize("name", REASONS)
def test_calls_that_ask_for_more_run_the_ordinary_forward(cache_of, name):
    more, reason = REASONS[name]
    model = shallow()
    cache = cache_of(model)
    ids, _ = prompts(1, 13)
    calls = []
    inner = model.model.norm.register_forward_pre_hook(lambda *call: calls.append(1))
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
        if name != "positions":
            model(ids[:, 12:], past_key_values=cache, **more)
            assert len(calls) == 2
        else:
            # A model with one coordinate per token refuses three, in the ordinary forward.
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                model(ids[:, 12:], past_key_values=cache, **more)
    inner.remove()
    assert reason in cache.stats().why_not_replayed
    assert cache.stats().graphs_recorded == 0


def test_modes_of_torch_and_of_the_model_run_the_ordinary_forward(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    embedded = model.get_input_embeddings()(ids[:, :1]).detach()
    modes = {
        "gradients": (torch.enable_grad(), {"input_ids": ids[:, :1]}),
        "autocast": (torch.autocast("cpu"), {"input_ids": ids[:, :1]}),
        "a torch mode": (torch.device("cpu"), {"input_ids": ids[:, :1]}),
        "no input_ids": (torch.no_grad(), {"inputs_embeds": embedded}),
    }
    for reason, (mode, call) in modes.items():
        cache.reset(keep_prefix=False)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        with torch.no_grad(), mode:
            model(**call, past_key_values=cache)
        assert reason in cache.stats().why_not_replayed
    model.train()
    cache.reset(keep_prefix=False)
    greedy(model, ids, mask, 2, past_key_values=cache)
    assert cache.stats().why_not_replayed == "the model is in training mode"
    model.set_attn_implementation("sdpa")
    model.eval()
    cache.reset(keep_prefix=False)
    greedy(model, ids, mask, 2, past_key_values=cache)
    assert 'set_attn_implementation("jaxkv")' in cache.stats().why_not_replayed
    assert cache.stats().graphs_recorded == 0


def test_a_step_with_a_padding_row_runs_the_ordinary_forward(cache_of):
    plain, model = shallow(), shallow()
    cache = cache_of(model)
    ids, mask = prompts(2, 8)
    step = torch.cat([mask, torch.tensor([[1], [0]])], 1)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        positions = torch.tensor([[8], [0]])
        got = model(
            ids[:, :1], attention_mask=step, position_ids=positions, past_key_values=cache
        ).logits[0]
        theirs = transformers.DynamicCache(config=plain.config)
        plain(ids, attention_mask=mask, past_key_values=theirs)
        wanted = plain(
            ids[:, :1], attention_mask=step, position_ids=positions, past_key_values=theirs
        ).logits[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert cache.stats().why_not_replayed == "a row of the step is padding"


class Broken:
    """A recorder that fails after it has called the function, and so after its writes."""

    def __init__(self, error):
        self._error = error
        self.num_tries = 0

    def record(self, function, pools):
        function(pools)
        self.num_tries += 1
        raise self._error

    def num_bytes(self):
        return 0


FAILURES = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory"), 4),
    "broken": (RuntimeError("operation failed due to a previous error during capture"), 4),
    "lasting": (TypeError("odd"), 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_recording_that_fails_costs_no_token_and_is_tried_again_if_the_reason_may_pass(
    cache_of, name
):
    error, tries = FAILURES[name]
    model = shallow()
    cache = cache_of(model)
    broken = cache._graphs._recorder = Broken(error)
    ids, mask = prompts(2, 12, (3, 0))
    wanted = greedy(shallow(), ids, mask, 3)
    for _ in range(6):
        assert torch.equal(greedy(model, ids, mask, 3, past_key_values=cache), wanted)
        cache.reset(keep_prefix=False)
    assert broken.num_tries == tries
    why = f"recording it failed: {type(error).__name__}: {error}"
    assert cache.stats().why_not_replayed == why
    check(cache)


def test_a_model_whose_forward_replaces_attributes_is_not_recorded_at_each_text(cache_of):
    model = shallow()
    cache = cache_of(model)
    mlp = model.model.layers[0].mlp
    mlp.calls = 0

    def counted(x):
        mlp.calls += 1
        return type(mlp).forward(mlp, x)

    mlp.forward = counted
    ids, mask = prompts(1, 12)
    wanted = greedy(shallow(), ids, mask, 4)
    frozen = cache._graphs._recorder
    for _ in range(6):
        assert torch.equal(greedy(model, ids, mask, 4, past_key_values=cache), wanted)
        cache.reset(keep_prefix=False)
    assert frozen.num_recorded == 4
    assert cache.stats().steps_replayed == 0
    assert "replaces attributes" in cache.stats().why_not_replayed


COUNTED = {
    "added": lambda count, tensor: tensor + 0 * count,
    "to a tensor": lambda count, tensor: tensor + count - count,
    "range": lambda count, tensor: tensor + 0 * torch.arange(count).sum(),
    "compared": lambda count, tensor: tensor + 0 if count > 3 else tensor,
    "equal": lambda count, tensor: tensor if count == 3 else tensor + 0,
    "true": lambda count, tensor: tensor if count else tensor + 0,
}


@pytest.mark.parametrize("use", COUNTED)
def test_code_that_computes_with_the_number_of_cached_tokens_is_not_recorded(cache_of, use):
    model = shallow()
    cache = cache_of(model)
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: plain(
        x, COUNTED[use](cache.get_seq_length(), position_ids)
    )
    ids, mask = prompts(1, 12)
    wanted = greedy(shallow(), ids, mask, 3)
    assert torch.equal(greedy(model, ids, mask, 3, past_key_values=cache), wanted)
    assert cache.stats().graphs_recorded == 0
    why = cache.stats().why_not_replayed
    assert "computes on the host with the number of cached" in why or "TypeError: arange" in why


def test_models_that_no_graph_can_stand_for_say_so():
    model = tiny_model(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
        )
        cache = JaxkvCache(model, graphs=True)
    assert "length of the text" in cache.stats().why_not_replayed
    assert "forward" not in vars(model)


def test_without_a_gpu_the_reason_is_stated_and_nothing_is_replaced():
    model = tiny_model()
    cache = JaxkvCache(model, graphs=True)
    assert "forward" not in vars(model)
    assert cache.stats().why_not_replayed == "the model is on cpu, and CUDA graphs need a GPU"


def test_graphs_are_made_where_they_can_unless_they_are_turned_off(cache_of):
    model = tiny_model()
    cache = JaxkvCache(model, graphs=False)
    assert "forward" not in vars(model)
    assert cache.stats().why_not_replayed == "the cache was made with graphs=False"
    cache = JaxkvCache(model)
    assert "forward" in vars(model)
    assert cache.stats().why_not_replayed is None


def test_two_caches_of_one_model_are_replayed_each_on_its_own_pool(cache_of):
    model = shallow()
    first, second = cache_of(model), cache_of(model)
    ids, mask = prompts(1, 12)
    wanted = greedy(shallow(), ids, mask, 9)
    said = {}
    for part in range(3):
        for cache in (first, second):
            text = said.get(cache, ids)
            said[cache] = greedy(model, text, torch.ones_like(text), 3, past_key_values=cache)
        if not part:
            del text
            gone = cache_of(model)
            del gone
    assert all(torch.equal(text, wanted) for text in said.values())
    assert first.stats().steps_replayed == second.stats().steps_replayed == 2 + 3 + 3


def test_a_copied_model_is_replayed_by_a_cache_of_its_own(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    wanted = greedy(model, ids, mask, 5, past_key_values=cache)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    own = cache_of(twin)
    assert torch.equal(greedy(twin, ids, mask, 5, past_key_values=own), wanted)
    assert own.stats().steps_replayed == 4


def test_a_replay_that_fails_poisons_and_reset_is_the_way_back(cache_of):
    model = shallow()
    cache = cache_of(model)
    cache._graphs._recorder = Again()
    ids, mask = prompts(1, 12)
    wanted = greedy(shallow(), ids, mask, 4)
    said = greedy(model, ids, mask, 3, past_key_values=cache)
    (recording,) = cache._graphs._recordings.values()
    work, recording.work = (
        recording.work,
        Again(lambda pools: (_ for _ in ()).throw(OSError("gone"))),
    )
    with pytest.raises(OSError, match="gone"):
        greedy(model, said, torch.ones_like(said), 1, past_key_values=cache)
    recording.work = work
    with pytest.raises(CachePoisoned, match=r"Call reset\(\)"):
        greedy(model, said, torch.ones_like(said), 1, past_key_values=cache)
    cache.reset()
    assert torch.equal(greedy(model, ids, mask, 4, past_key_values=cache), wanted)
    assert cache.stats().why_not_replayed is None
    check(cache)


def test_threads_replay_caches_of_their_own(cache_of):
    model = shallow()
    ids, mask = prompts(1, 12)
    wanted, said = greedy(shallow(), ids, mask, 8), []
    caches = [cache_of(model) for _ in range(2)]
    for cache in caches:
        cache._graphs._recorder = Again()

    def run(cache):
        said.append(greedy(model, ids, mask, 8, past_key_values=cache))

    threads = [threading.Thread(target=run, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, wanted) for one in said)
    assert [cache.stats().steps_replayed for cache in caches] == [7, 7]


def test_recordings_are_freed_with_the_last_fork_of_their_cache(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    greedy(model, ids, mask, 3, past_key_values=cache)
    (recording,) = cache._graphs._recordings.values()
    gone = [weakref.ref(one) for one in (recording, cache._store)]
    child = cache.fork()
    del cache, recording
    more = torch.cat([ids, ids], 1)
    greedy(model, more, torch.ones_like(more), 3, past_key_values=child)
    assert child.stats().steps_replayed == 4
    del child
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert "forward" not in vars(model)


def test_recordings_are_freed_once_the_stream_of_the_last_replay_is_done(cache_of):
    waits = []

    class Stream:
        def synchronize(self):
            waits.append(len(recordings))

    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 12)
    greedy(model, ids, mask, 3, past_key_values=cache)
    recordings = cache._graphs._recordings
    cache._graphs._order._latest = Stream()
    cache._graphs.drop("a reason")
    assert waits == [1]
    cache.reset()
    greedy(model, ids, mask, 3, past_key_values=cache)
    del cache
    gc.collect()
    assert waits == [1, 1]


class Again:
    """Calls the recorded function again, where the tracer of `FrozenRecorder` cannot see through a compiled model."""

    def __init__(self, function=None):
        self.replay = function

    def record(self, function, pools):
        function(pools)
        return Again(function)

    def num_bytes(self):
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_is_replayed_too(cache_of, whole):
    plain, model = shallow(), shallow()
    ids, mask = prompts(1, 12)
    wanted = greedy(plain, ids, mask, 6)
    cache = cache_of(model)
    cache._graphs._recorder = Again()
    traced = []

    def backend(program, inputs):
        traced.append(program)
        return program.forward

    if whole:
        called = torch.compile(model, backend=backend)
    else:
        model.forward = torch.compile(model.forward, backend=backend)
        called = model
    said = ids
    with torch.no_grad():
        for _ in range(6):
            start = 0 if said is ids else said.shape[1] - 1
            out = called(
                said[:, start:],
                attention_mask=torch.ones_like(said),
                position_ids=torch.arange(start, said.shape[1])[None],
                past_key_values=cache,
            )
            said = torch.cat([said, out.logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(said, wanted)
    assert (cache.stats().steps_replayed, cache.stats().graphs_recorded) == (5, 1)
    assert traced


@pytest.mark.slow
def test_steps_between_tokens_that_are_taken_back_are_replayed(cache_of):
    """Prompt lookup mixes steps of one token, which are replayed, with drafts, of which some tokens are taken back."""
    plain, model = shallow(), shallow()
    cache = cache_of(model, page_size=4)
    ids, mask = prompts(1, 21)
    ids[:, 12:18] = ids[:, 3:9]
    options = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    taken, crop = [], cache.crop
    cache.crop = lambda count: (taken.append(-int(count)), crop(count))[1]
    for _ in range(2):
        wanted = greedy(plain, ids, mask, 30, **options)
        assert torch.equal(greedy(model, ids, mask, 30, past_key_values=cache, **options), wanted)
        # Others take the pages that were freed.
        other = cache.fork()
        cache.reset()
    assert cache.stats().steps_replayed > 4
    assert max(taken) > 1
    del other
    check(cache)
