"""Replayed decode steps of models with recurrent layers: each state advances once per token, and no other state."""

import pytest
import torch

from jaxkv import SamplingParams
from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import check, greedy, prompts
from tests.torch_bridge.tiny_recurrent import RECURRENT, cache_name, recurrent_model
from torch_bridge import JaxkvCache, generate, lease

pytestmark = pytest.mark.torch
QUICK = ("Bamba", "Mamba2")
FAMILIES = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in RECURRENT
    # Attention on pages, which recorded steps need, is refused where keys are made of latents.
    if family != "KimiLinear"
]


@pytest.fixture
def pair(monkeypatch):
    """Makes a model with attention on pages and a cache whose decode steps are frozen, and the stock twin."""
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
    )

    def make(family, **options):
        model, twin = recurrent_model(family), recurrent_model(family)
        cache = JaxkvCache(model, **{"max_tokens": 512, "page_size": 8, "graphs": True, **options})
        if cache.parts.store.layout.paged_groups:
            model.set_attn_implementation("jaxkv")
        return model, twin, cache

    return make


def said(model, ids, mask, count, cache=None, **options):
    if cache is not None:
        options[cache_name(model)] = cache
    return greedy(model, ids, mask, count, **options)


def zero_state(cache):
    """Whether state 0 of all layers is zero, from which rows begin."""
    groups = cache.parts.store.layout.state_groups
    names = [f"layer{n}.{a.role}" for g in groups for n in g.layers for a in g.spec.arrays]
    with lease(cache, write=False) as views:
        return not any(bool(views[name][0].any()) for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_frozen_step_serves_padded_rows_forks_beams_and_turns(pair, family):
    model, twin, cache = pair(family)
    # Three rows are replayed with a fourth, which is padding; two of the prompts are padded too.
    ids, mask = prompts(3, 19, (4, 0, 1))
    wanted = said(twin, ids, mask, 9)
    assert torch.equal(said(model, ids, mask, 9, cache), wanted)
    assert len(wanted[:, 19:].unique()) > 5
    # The fork shares the states that both read, and each writes its own.
    more, shown = prompts(3, 1, seed=4)[0], torch.cat([mask, torch.ones(3, 10, dtype=int)], 1)
    longer = torch.cat([wanted, more], 1)
    child = cache.fork()
    wanted = said(twin, longer, shown, 5)
    for holder in (child, cache):
        assert torch.equal(said(model, longer, shown, 5, holder), wanted)
    child.reset()
    cache.reset()
    wanted = said(twin, ids[1:2], mask[1:2], 7, num_beams=3)
    assert torch.equal(said(model, ids[1:2], mask[1:2], 7, cache, num_beams=3), wanted)
    stats = cache.stats()
    assert stats.why_not_replayed is None
    assert (stats.steps_replayed, stats.graphs_recorded) == (8 + 2 * 4 + 6, 1)
    assert zero_state(cache)
    check(cache)


def test_a_model_that_changes_within_a_text_advances_no_state_twice(pair):
    model, twin, cache = pair("Bamba")
    twin.set_attn_implementation("jaxkv")
    ids, mask = prompts(1, 12)
    told = []
    for one, holder in ((model, cache), (twin, JaxkvCache(twin, max_tokens=256, graphs=False))):
        first = said(one, ids, mask, 5, holder)
        one.model.layers[1].self_attn.scaling = 3.0
        told.append(said(one, first, torch.ones_like(first), 8, holder))
    assert torch.equal(*told)
    assert "attributes" in cache.stats().why_recorded_again
    assert cache.stats().steps_replayed == 4 + 8


class Broken:
    """A recorder that fails after it has called the function, and so after the writes of a step."""

    def record(self, function, pools):
        function(pools)
        raise RuntimeError("no graph")

    def num_bytes(self):
        return 0


@pytest.mark.parametrize("family", QUICK)
def test_a_recording_that_fails_advances_no_state(pair, family):
    model, twin, cache = pair(family)
    cache._graphs._recorder = Broken()
    ids, mask = prompts(2, 12, (3, 0))
    assert torch.equal(said(model, ids, mask, 6, cache), said(twin, ids, mask, 6))
    assert "no graph" in cache.stats().why_not_replayed
    assert zero_state(cache)
    check(cache)


def test_a_forward_that_computes_with_the_number_of_tokens_costs_no_state(pair):
    """The recording fails between two layers, of which one has written its states."""
    model, twin, cache = pair("Bamba")
    last = model.model.layers[2].mamba
    plain = type(last).forward

    def counted(hidden_states, **options):
        return plain(last, hidden_states + 0 * cache.get_seq_length(), **options)

    last.forward = counted
    ids, mask = prompts(1, 12)
    assert torch.equal(said(model, ids, mask, 6, cache), said(twin, ids, mask, 6))
    assert "number of cached tokens" in cache.stats().why_not_replayed
    check(cache)


def test_a_text_of_one_token_runs_the_ordinary_forward(pair):
    model, twin, cache = pair("Mamba2")
    ids, mask = prompts(2, 1)
    assert torch.equal(said(model, ids, mask, 1, cache), said(twin, ids, mask, 1))
    assert "one token" in cache.stats().why_not_replayed
    cache.reset()
    assert torch.equal(said(model, ids, mask, 6, cache), said(twin, ids, mask, 6))
    assert cache.stats().steps_replayed == 5


def test_pages_that_are_kept_beyond_the_states_are_not_written_by_a_replay(pair):
    model, _, cache = pair("Bamba")
    ids, mask = prompts(1, 16)
    # The states after 15 tokens, and both pages of the 16.
    for count in (15, 16):
        said(model, ids[:, :count], mask[:, :count], 1, cache)
        cache.reset()
    before = cache.stats()
    with lease(cache) as views:
        views["layer1.key"].fill_(0.5)
        views.commit()
    said(model, ids, mask, 1, cache)
    after = cache.stats()
    assert after.tokens_reused - before.tokens_reused == 15
    assert after.steps_replayed - before.steps_replayed == 1
    [row] = cache._sequences.rows
    assert cache._store.allocator.held(row.number).covered["gqa"] == 16
    with lease(cache, write=False) as views:
        assert bool((views["layer1.key"] == 0.5).all())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bamba", "Mamba2", "Qwen3Next"])
def test_batches_of_many_prompts_are_replayed_too(pair, family):
    model, twin, cache = pair(family, max_sequences=4)
    given = [prompts(1, length, seed=length)[0] for length in (5, 19, 1, 11, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=9)
    made = generate(model, [ids[0].tolist() for ids in given], params, cache=cache, max_sequences=3)
    for ids, out in zip(given, made, strict=True):
        wanted = said(twin, ids, torch.ones_like(ids), 9)[0, ids.shape[1] :]
        assert out.token_ids == wanted.tolist()
    assert cache.stats().why_not_replayed is None
    assert cache.stats().steps_replayed > 9
    assert zero_state(cache)
    check(cache)
