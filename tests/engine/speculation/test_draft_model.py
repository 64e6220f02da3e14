"""A smaller model drafts: outputs stay what they are, and a model that agrees is always right, drawn or greedy."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig, default_model
from jaxkv.engine.speculation.draft_model import DraftModel
from tests.engine.engines import engine_for
from tests.one_layer import one_layer_model

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "x",
    "for name in names:\n    pri",
]
WAYS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 4, "logprobs": 2},
}


def served(sampling, *, engine=None, warm=True, **options):
    """Returns what the prompts give under strict mode, after a warm-up, and the statistics."""
    options |= {"max_model_len": 128, "cache": CacheConfig(max_sequences=3)}
    engine = engine or EngineConfig(token_budget=32, batch_invariant=True)
    with LLM(strict=True, progress=False, engine=engine, **options) as llm:
        if warm:
            llm.warm_up(batch=3, prompt_tokens=40, sampling=sampling)
        outputs = llm.generate(PROMPTS, sampling)
        again = llm.generate(PROMPTS[:1], sampling)
        stats = llm.stats()
    assert again[0].token_ids == outputs[0].token_ids
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in outputs], stats


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with other weights than the one in the package, and the same vocabulary."""
    folder = tmp_path_factory.mktemp("model") / "other"
    shutil.copytree(default_model.path(), folder)
    draw = np.random.default_rng(0)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        noisy = {
            name: (value + 0.02 * draw.standard_normal(value.shape)).astype(value.dtype)
            for name, value in tensors.items()
        }
        save_file(noisy, path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_agrees_is_always_right(way):
    """Drafts are drawn with the noise of their position, so at any temperature a right one is the verifier's token."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **WAYS[way])
    wanted, plain = served(sampling)
    config = SpeculationConfig(
        method="draft_model", model=default_model.path(), tokens=3, adaptive=False
    )
    got, stats = served(sampling, speculation=config)
    assert got == wanted
    accepted, drafted = stats.speculation.accepted, stats.speculation.drafted
    # The first step of a request verifies no draft of the model.
    assert accepted[1] > 0.9 * drafted[1]
    assert stats.speculation.overlapped > stats.speculation.steps // 2
    assert stats.steps < plain.steps // 2
    assert stats.compiled_late == 0


@pytest.mark.slow
def test_a_model_with_other_weights_changes_no_token(other):
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **WAYS["drawn"])
    wanted, _ = served(sampling)
    config = SpeculationConfig(method="draft_model", model=other, tokens=3, adaptive=False)
    got, stats = served(sampling, speculation=config)
    assert got == wanted
    assert 0 < stats.speculation.accepted[0] < stats.speculation.drafted[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("model") / "small")


def drafting(model, **options):
    """Returns an `LLM` whose own model drafts for it."""
    speculation = SpeculationConfig(model=model, tokens=2, adaptive=False)
    engine = EngineConfig(token_budget=32, batch_invariant=True, speculation=speculation)
    options |= {"cache": CacheConfig(max_sequences=3, page_size=16, budget_bytes=158_000)}
    return LLM(model, engine=engine, max_model_len=96, progress=False, **options)


def test_drafts_survive_preemptions_sleep_and_a_lost_cache(small):
    """What the smaller model lacks then it computes anew."""
    prompts = [prompt + "y" * at for at, prompt in enumerate(PROMPTS * 2)]
    sampling = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.7, seed=1)
    options = {"cache": CacheConfig(max_sequences=3), "max_model_len": 96, "progress": False}
    with LLM(small, engine=EngineConfig(token_budget=32, batch_invariant=True), **options) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, sampling)]
    with drafting(small) as llm:
        first = llm.generate(prompts, sampling)
        assert sum(one.usage.preemptions for one in first) > 0
        drafter = llm.engine.speculation.drafter
        assert len(drafter._rows) <= 3
        llm.sleep()
        assert drafter._runner.owner.poisoned
        llm.wake_up()
        second = llm.generate(prompts, sampling)
        drafter._runner.owner.poison("the test says so")
        drafter._forget()
        third = llm.generate(prompts, sampling)
        stats = llm.stats().speculation
        for served in (first, second, third):
            assert [one.token_ids for one in served] == wanted
        assert stats.accepted[1] > 0.7 * stats.drafted[1]
        assert drafter._failures == 0
    assert not drafter._rows


def test_a_model_that_fails_costs_drafts_and_no_request(small, monkeypatch, caplog):
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    with drafting(small) as llm:
        drafter = llm.engine.speculation.drafter

        def fail(*_):
            raise RuntimeError("injected")

        monkeypatch.setattr(drafter, "_chain", fail)
        outputs = llm.generate(PROMPTS, sampling)
        assert [len(one.token_ids) for one in outputs] == [24] * 3
        assert "injected" in caplog.text
        assert drafter._failures > 0


def test_drafts_with_other_random_numbers_are_right_less_often(small, monkeypatch):
    """So the share of right drafts shows that they are drawn with the noise of their position."""
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3)
    shares = []
    for shift in (0, 1):
        row = DraftModel._row

        def shifted(sequence, *others, row=row, shift=shift, **options):
            made = row(sequence, *others, **options)
            return replace(made, seed=made.seed + shift)

        monkeypatch.setattr(DraftModel, "_row", staticmethod(shifted))
        with drafting(small) as llm:
            llm.generate(PROMPTS, sampling)
            stats = llm.stats().speculation
        shares.append(stats.accepted[1] / stats.drafted[1])
    assert shares[0] > 0.9
    assert shares[1] < 0.4


def test_models_that_cannot_draft_are_refused(small, tmp_path):
    wide = one_layer_model(tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    with pytest.raises(ValueError, match=r"needs the vocabulary .* it has 77"):
        LLM(small, speculation=SpeculationConfig(model=wide), progress=False)
    with pytest.raises(ValueError, match="make it by LLM"):
        engine_for(speculation=SpeculationConfig(model="anything"))
