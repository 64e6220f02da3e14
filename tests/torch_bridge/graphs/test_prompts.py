"""Replayed prompts: the tokens of Transformers for any number of new tokens and rows, and which are not replayed."""

import functools

import pytest
import torch

import torch_bridge
from jaxkv import SamplingParams
from tests.torch_bridge.graphs.frozen import Frozen, FrozenRecorder
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from torch_bridge import JaxkvCache
from torch_bridge.graphs import step_graphs
from torch_bridge.transformers_cache import cache as cache_module
from torch_bridge.transformers_cache.fingerprint import KnownModel

pytestmark = pytest.mark.torch
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def shallow():
    return tiny_model(num_hidden_layers=1)


@pytest.fixture
def cache_of(monkeypatch):
    """Makes caches whose steps are frozen on the CPU."""

    def make(model, **options):
        model.set_attn_implementation("jaxkv")
        return JaxkvCache(model, **{"max_tokens": 512, "graphs": True, **options})

    monkeypatch.setattr(cache_module, "recorder_for", lambda device: FrozenRecorder())
    return make


def test_one_recording_serves_prompts_of_any_length_rows_padding_and_kept_prefixes(cache_of):
    twin, model = shallow(), shallow()
    cache = cache_of(model, page_size=8)
    for number, (rows, columns, pads) in enumerate(
        [(1, 21, ()), (3, 12, (5, 0, 9)), (1, 50, ()), (1, 1, ()), (2, 30, (0, 7)), (8, 8, ())]
    ):
        ids, mask = prompts(rows, columns, pads, seed=number)
        wanted = greedy(twin, ids, mask, 1)
        assert torch.equal(greedy(model, ids, mask, 1, past_key_values=cache), wanted)
        cache.reset()
    assert cache.stats().prompts_replayed == 4
    ids, mask = prompts(1, 50, seed=2)
    ids[:, 40:] = 9
    wanted = greedy(twin, ids, mask, 9)
    assert torch.equal(greedy(model, ids, mask, 9, past_key_values=cache), wanted)
    stats = cache.stats()
    assert stats.tokens_reused == 40
    assert (stats.prompts_replayed, stats.why_prompt_not_replayed) == (5, None)
    assert (stats.graphs_recorded, stats.steps_replayed) == (2, 9)
    check(cache)


def test_a_replayed_prompt_leaves_the_pages_and_logits_of_the_ordinary_one(cache_of):
    """The padding of the recording is written nowhere. Products of other sizes may round otherwise."""
    model = shallow()
    cache, plain = cache_of(model, max_tokens=128), cache_of(model, max_tokens=128, graphs=False)
    ids, mask = prompts(1, 44)
    options = {"attention_mask": mask, "position_ids": torch.arange(44)[None], "logits_to_keep": 1}
    said = {}
    for holder in (plain, plain, cache, cache):
        holder.reset(keep_prefix=False)
        with torch.no_grad():
            said[holder] = model(ids, past_key_values=holder, **options).logits
    assert cache.stats().prompts_replayed == 1
    assert said[cache].shape == said[plain].shape
    torch.testing.assert_close(said[cache], said[plain], rtol=0, atol=1e-5)
    with torch_bridge.lease(cache) as ours, torch_bridge.lease(plain) as theirs:
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)
        ours.commit()
        theirs.commit()


def test_generate_replays_packed_prompts(cache_of):
    twin, model = shallow(), shallow()
    cache = cache_of(model)
    for number in range(2):
        ids, _ = prompts(3, 15, seed=number)
        texts = [line[: 15 - 4 * row].tolist() for row, line in enumerate(ids)]
        outputs = torch_bridge.generate(model, texts, ONE, cache=cache)
        for text, output in zip(texts, outputs, strict=True):
            alone = torch.tensor([text])
            wanted = greedy(twin, alone, torch.ones_like(alone), 1)[0, -1:].tolist()
            assert output.outputs[0].token_ids == wanted
    stats = cache.stats()
    assert (stats.prompts_replayed, stats.why_prompt_not_replayed) == (1, None)
    assert stats.graphs_recorded == 1
    greedy(model, ids, torch.ones_like(ids), 3, past_key_values=cache)
    assert cache.stats().leases_taken == 1
    check(cache)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("memory"), ValueError("model's own")])
def test_a_recording_that_fails_after_its_writes_costs_no_token(cache_of, monkeypatch, error):
    class Failing(FrozenRecorder):
        def record(self, function, pools):
            function(pools)
            raise error

    twin, model = shallow(), shallow()
    cache = cache_of(model)
    cache._graphs._recorder = Failing()
    for number in range(3):
        ids, mask = prompts(2, 20, (0, 3), seed=number)
        wanted = greedy(twin, ids, mask, 1)
        assert torch.equal(greedy(model, ids, mask, 1, past_key_values=cache), wanted)
        cache.reset(keep_prefix=False)
    stats = cache.stats()
    assert str(error) in str(stats.why_prompt_not_replayed)
    assert (stats.prompts_replayed, stats.graphs_recorded, stats.leases_taken) == (0, 0, 1)
    check(cache)


def test_a_changed_model_is_recorded_again_at_the_next_prompt(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 20)

    def follows():
        model.set_attn_implementation("sdpa")
        wanted = greedy(model, ids, mask, 1)
        model.set_attn_implementation("jaxkv")
        cache.reset(keep_prefix=False)
        assert torch.equal(greedy(model, ids, mask, 1, past_key_values=cache), wanted)
        return cache.stats().graphs_recorded

    assert [follows(), follows()] == [0, 1]
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(-1)
    assert follows() == 1
    layer.self_attn.scaling = 0.9
    assert follows() == 2
    layer.mlp.up_proj.weight = torch.nn.Parameter(-2 * layer.mlp.up_proj.weight.detach())
    assert follows() == 3
    hook = layer.register_forward_hook(lambda *call: None)
    assert follows() == 3
    assert "has hooks" in str(cache.stats().why_prompt_not_replayed)
    hook.remove()
    assert follows() == 4
    assert cache.stats().prompts_replayed == 5


class Scaled(torch.nn.Module):
    """A layer whose output is scaled by a number inside a dict."""

    def __init__(self, base):
        super().__init__()
        self.base, self.factors = base, {"one": 1.0}

    def forward(self, x):
        return self.factors["one"] * self.base(x)


def flip(model):
    model.model.layers[0].self_attn.k_proj.weight.data.neg_()


CHANGES = {
    "weight": flip,
    "attribute": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "config": lambda model: setattr(model.config, "attention_dropout", 0.5),
    "container": lambda model: model.model.layers[0].mlp.down_proj.factors.update(one=-2.0),
    "module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
}


# A changed model reuses no page in tests/torch_bridge/batching/test_generate.py; the test above records it again.
@pytest.mark.slow
def test_a_second_turn_after_a_change_is_computed_from_its_first_token(cache_of):
    model = shallow()
    model.model.layers[0].mlp.down_proj = Scaled(model.model.layers[0].mlp.down_proj)
    cache = cache_of(model)
    for name, change in [("none", id), ("none", id), *CHANGES.items()]:
        ids, mask = prompts(1, 50, seed=len(name))
        greedy(model, ids[:, :40], mask[:, :40], 1, past_key_values=cache)
        cache.reset()
        change(model)
        model.set_attn_implementation("sdpa")
        wanted = greedy(model, ids, mask, 3)
        model.set_attn_implementation("jaxkv")
        before = cache.stats()
        assert torch.equal(greedy(model, ids, mask, 3, past_key_values=cache), wanted), name
        reused = cache.stats().tokens_reused - before.tokens_reused
        assert reused == (32 if name == "none" else 0), name
        cache.reset()
        # What it has computed is kept for the next turn.
        assert torch.equal(greedy(model, ids, mask, 3, past_key_values=cache), wanted), name
        assert cache.stats().tokens_reused == before.tokens_reused + reused + 48, name
        cache.reset(keep_prefix=False)
        check(cache)


@pytest.fixture
def order(monkeypatch):
    """What was begun, replayed and compared, in this order."""
    seen = []
    begin, replay = KnownModel.begin_fingerprint, Frozen.replay

    def begun(known):
        finish = begin(known)
        seen.append("begun")
        return lambda: seen.append("compared") or finish()

    def replayed(frozen, pools):
        if pools:
            seen.append("replayed")
        return replay(frozen, pools)

    monkeypatch.setattr(KnownModel, "begin_fingerprint", begun)
    monkeypatch.setattr(Frozen, "replay", replayed)
    return seen


def run_twice(model, cache, ids, mask):
    """Has a prompt of this size recorded."""
    for _ in range(2):
        greedy(model, ids, mask, 1, past_key_values=cache)
        cache.reset(keep_prefix=False)


def test_a_replay_is_queued_before_the_host_waits_for_the_checksum(cache_of, order):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 30)
    run_twice(model, cache, ids, mask)
    order.clear()
    greedy(model, ids, mask, 1, past_key_values=cache)
    assert order == ["begun", "replayed", "compared"]


def test_a_wrapper_of_the_forward_has_the_model_compared_before_it_runs(cache_of, order):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 40)
    run_twice(model, cache, ids, mask)
    greedy(model, ids, mask, 1, past_key_values=cache)
    cache.reset()
    plain = model.forward
    model.forward = functools.wraps(plain)(lambda *args, **kwargs: plain(*args, **kwargs))
    flip(model)
    model.set_attn_implementation("sdpa")
    wanted = greedy(model, ids, mask, 1)
    model.set_attn_implementation("jaxkv")
    order.clear()
    assert torch.equal(greedy(model, ids, mask, 1, past_key_values=cache), wanted)
    assert order[:2] == ["begun", "compared"]
    assert cache.stats().tokens_reused == 0


def test_what_a_hook_puts_into_the_arguments_stays_where_the_forward_begins_anew(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 40)
    positions = torch.arange(40)[None]
    greedy(model, ids, mask, 1, past_key_values=cache)
    cache.reset()
    flip(model)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"logits_to_keep": 2}), with_kwargs=True
    )
    with torch.no_grad():
        said = model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
        hook.remove()
        model.set_attn_implementation("sdpa")
        wanted = model(ids, position_ids=positions, logits_to_keep=2).logits
    torch.testing.assert_close(said, wanted, rtol=0, atol=1e-5)


def test_a_forward_whose_arguments_a_hook_makes_positional_begins_anew_too(cache_of):
    model = shallow()
    cache = cache_of(model)
    ids, mask = prompts(1, 40)
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (tuple(kwargs.pop(name) for name in names), kwargs),
        with_kwargs=True,
    )
    run_twice(model, cache, ids, mask)
    greedy(model, ids, mask, 1, past_key_values=cache)
    assert cache.stats().prompts_replayed == 2
    cache.reset()
    flip(model)
    wanted = greedy(model, ids, mask, 1, past_key_values=JaxkvCache(model, graphs=False))
    assert torch.equal(greedy(model, ids, mask, 1, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 0
    check(cache)


def test_other_prompts_run_the_ordinary_forward_and_say_why(cache_of, monkeypatch):
    monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 40)
    model = shallow()
    cache = cache_of(model)

    def reasons(rows, columns, pads=(), **more):
        ids, mask = prompts(rows, columns, pads)
        mask = mask.flip(1) if more.pop("flipped", False) else mask
        for _ in range(2):
            cache.reset(keep_prefix=False)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            options = {"position_ids": positions, "logits_to_keep": 1, **more}
            with torch.no_grad():
                model(ids, attention_mask=mask, past_key_values=cache, **options)
        return cache.stats().why_prompt_not_replayed

    assert reasons(1, 41) == "41 new tokens in 1 rows; at most 40 in 8 rows are recorded"
    assert "in 9 rows" in reasons(9, 3)
    assert "logits_to_keep=0" in reasons(1, 9, logits_to_keep=0)
    assert "logits_to_keep=2" in reasons(1, 9, logits_to_keep=2)
    assert reasons(2, 9, (3, 0), flipped=True) == "a row ends in padding"
    assert "no position_ids" in reasons(1, 9, position_ids=None)
    assert "hidden_states" in reasons(1, 9, output_hidden_states=True)
    assert cache.stats().graphs_recorded == cache.stats().prompts_replayed == 0
    cache.reset(keep_prefix=False)
    ids, mask = prompts(1, 9)
    greedy(model, ids, mask, 1, past_key_values=cache)
    assert "the first prompt of at most 64 new tokens" in cache.stats().why_prompt_not_replayed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_windows_norms_and_soft_caps_are_frozen_too(cache_of, family):
    twin, model = tiny_model(family), tiny_model(family)
    cache = cache_of(model)
    for number in range(3):
        ids, mask = prompts(3, 21, (5, 0, 17), seed=number)
        wanted = greedy(twin, ids, mask, 4)
        assert torch.equal(greedy(model, ids, mask, 4, past_key_values=cache), wanted)
        cache.reset()
    assert cache.stats().prompts_replayed == 2
