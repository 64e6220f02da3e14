"""Recorded decode steps, when a model is moved, a recording or a replay is interrupted, or memory runs out."""

import pytest
import torch

from jaxkv.errors import CachePoisoned
from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from tests.torch_bridge.tiny_recurrent import recurrent_model
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch


@pytest.fixture
def recorder(monkeypatch):
    """The recorder of the caches that are made next; its records and replays can be made to fail once."""

    class Failing(FrozenRecorder):
        error = None

        def record(self, function, pools):
            work = super().record(function, pools)
            return Failing.Work(self, self.fail(work))

        def fail(self, result):
            error, self.error = self.error, None
            if error is not None:
                raise error
            return result

        class Work:
            def __init__(self, recorder, work):
                self._recorder, self._work = recorder, work

            def replay(self, pools):
                # The step has run, and its writes are made.
                return self._recorder.fail(self._work.replay(pools))

    made = Failing()
    monkeypatch.setattr("torch_bridge.transformers_cache.cache.recorder_for", lambda device: made)
    return made


def made(kind):
    model = recurrent_model("Bamba") if kind == "bamba" else tiny_model(num_hidden_layers=1)
    twin = recurrent_model("Bamba") if kind == "bamba" else tiny_model(num_hidden_layers=1)
    model.set_attn_implementation("jaxkv")
    return model, twin, JaxkvCache(model, max_tokens=256, graphs=True)


def further(model, text, count, cache):
    return greedy(model, text, torch.ones_like(text), count, past_key_values=cache)


def test_a_model_that_is_moved_in_a_text_is_refused_elsewhere_and_recorded_again(recorder):
    model, twin, cache = made("llama")
    ids, mask = prompts(1, 12)
    wanted = greedy(twin, ids, mask, 12)
    said = further(model, ids, 4, cache)
    # While the old tensors are kept, the new ones are elsewhere.
    kept = [one.detach() for one in model.parameters()]
    model.to(torch.float64)
    with pytest.raises(ValueError, match="make a new JaxkvCache"):
        further(model, said, 4, cache)
    model.to(torch.float32)
    # Others take the old memory.
    for one in kept:
        one.fill_(torch.nan)
    said = further(model, said, 4, cache)
    assert torch.equal(further(model, said, 4, cache), wanted)
    assert "moved" in cache.stats().why_recorded_again
    assert cache.stats().graphs_recorded == 2
    check(cache)


@pytest.mark.parametrize("kind", ["llama", pytest.param("bamba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["recording", "replay"])
def test_an_interrupt_poisons_the_pool_and_reset_is_the_way_back(recorder, kind, when):
    model, twin, cache = made(kind)
    ids, mask = prompts(1, 12)
    said = further(model, ids, 2 if when == "replay" else 1, cache)
    recorder.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        further(model, said, 3, cache)
    with pytest.raises(CachePoisoned, match=r"Call reset\(\)"):
        further(model, said, 3, cache)
    cache.reset()
    assert torch.equal(further(model, ids, 6, cache), greedy(twin, ids, mask, 6))
    assert cache.stats().why_not_replayed is None
    check(cache)


def test_a_recording_without_memory_after_the_writes_of_its_step_advances_no_state(recorder):
    model, twin, cache = made("bamba")
    ids, mask = prompts(1, 12)
    said = further(model, ids, 1, cache)
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    wanted = greedy(twin, ids, mask, 5)
    assert torch.equal(further(model, said, 4, cache), wanted)
    assert "out of memory" in cache.stats().why_not_replayed
    cache.reset()
    assert torch.equal(further(model, ids, 5, cache), wanted)
    assert cache.stats().why_not_replayed is None
    check(cache)
