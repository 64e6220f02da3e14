"""A smaller model drafts: outputs stay what they are, and a model that agrees is always right, drawn or greedy."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import (
    LLM,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
    StructuredOutputs,
    default_model,
)
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.speculation.draft_model import DraftModel
from jaxkv.errors import CachePoisoned, OutOfMemory
from tests.engine.engines import engine_for
from tests.fast_cases import fast_cases
from tests.few_programs import few_programs
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


def drafting(model, *, batch_invariant=True, **options):
    """Returns an `LLM` whose own model drafts for it."""
    speculation = SpeculationConfig(model=model, tokens=2, adaptive=False)
    engine = EngineConfig(token_budget=32, batch_invariant=batch_invariant, speculation=speculation)
    options |= {"cache": CacheConfig(max_sequences=3, page_size=16, budget_bytes=158_000)}
    return LLM(model, engine=engine, max_model_len=96, progress=False, **options)


# The fast test of a head has these and more (test_draft_heads.py).
@pytest.mark.slow
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


@pytest.fixture(scope="module")
def started(small):
    with few_programs(drafting(small, batch_invariant=False), tokens=32) as llm:
        yield llm


@pytest.fixture
def alike(started):
    """An `LLM` whose own model drafts for it, and has not failed yet."""
    started.engine.speculation.drafter._failures = 0
    return started


def test_a_model_that_fails_costs_drafts_and_no_request(alike, monkeypatch, caplog):
    drafter = alike.engine.speculation.drafter

    def fail(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(drafter, "_chain", fail)
    outputs = alike.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [len(one.token_ids) for one in outputs] == [24] * 3
    assert "injected" in caplog.text
    assert drafter._failures > 0


def test_no_memory_for_the_smaller_models_cache_costs_no_request(alike, monkeypatch):
    """After a sleep, for example, others may have taken it."""

    def fail():
        raise OutOfMemory("injected")

    alike.sleep()
    alike.wake_up()
    drafter = alike.engine.speculation.drafter
    monkeypatch.setattr(drafter._runner.owner, "rebuild", fail)
    outputs = alike.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [len(one.token_ids) for one in outputs] == [24] * 3
    assert drafter._failures > 0


def test_a_model_that_fails_on_the_device_drafts_no_more(alike, monkeypatch, caplog):
    """The cache of the verifying model, which took its drafts over, is lost once, and not with each further draft."""
    drafter, runner = alike.engine.speculation.drafter, alike.engine.runner
    chain, read, recoveries = drafter._chain, runner.read, alike.engine.recoveries
    error = jax.errors.JaxRuntimeError("injected on the device")
    failed = []

    def failing_chain(parts):
        chain(parts)
        failed.append(parts)

    def failing_read(out):
        if failed:
            failed.clear()
            runner.owner.poison("injected", cause=error)
            raise error
        return read(out)

    def wait(_arrays):
        raise error

    monkeypatch.setattr(drafter, "_chain", failing_chain)
    monkeypatch.setattr(runner, "read", failing_read)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    outputs = alike.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [len(one.token_ids) for one in outputs] == [24] * 3
    assert alike.engine.recoveries == recoveries + 1
    assert "drafts no more" in caplog.text
    assert not drafter._rows


def test_another_lost_cache_leaves_the_drafts_on(alike):
    accepted, recoveries = alike.stats().speculation.accepted[1], alike.engine.recoveries
    alike.engine._recover(CachePoisoned("injected"))
    alike.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert alike.engine.recoveries == recoveries + 1
    assert alike.engine.speculation.drafter._failures == 0
    assert alike.stats().speculation.accepted[1] > accepted


BESIDE = {
    "a grammar": {"structured_outputs": StructuredOutputs(regex="[a-z ]{60,80}")},
    "fewer than min_tokens": {"min_tokens": 30, "ignore_eos": True},
    "nothing that overlaps": None,
}


# The host reads before the next step for either of the first two.
@pytest.mark.parametrize("beside", fast_cases(BESIDE, "a grammar", "nothing that overlaps"))
def test_drafts_are_verified_if_the_host_reads_every_step_first(alike, monkeypatch, beside):
    """Such steps do not follow one another on the device, where the drafts stay."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    wanted = alike.generate(PROMPTS[:1], greedy)[0].token_ids
    prompts, sampling = PROMPTS[:1], [greedy]
    if BESIDE[beside] is None:
        config = replace(alike.engine.config, overlap=False)
        monkeypatch.setattr(alike.engine, "config", config)
    else:
        prompts = PROMPTS[:2]
        sampling.append(SamplingParams(temperature=0.0, max_tokens=30, **BESIDE[beside]))
    before = alike.stats().speculation
    assert alike.generate(prompts, sampling)[0].token_ids == wanted
    after = alike.stats().speculation
    accepted, drafted = after.accepted[1], after.drafted[1]
    assert drafted - before.drafted[1] > 5
    assert accepted - before.accepted[1] > 0.8 * (drafted - before.drafted[1])
    assert after.overlapped == before.overlapped


@pytest.mark.slow
def test_page_tables_hold_what_rejected_drafts_have_reserved(small, tmp_path):
    """Behind a text of almost 512 tokens, the drafts need a longer table than the text alone."""
    long = shutil.copytree(small, tmp_path / "long")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    speculation = SpeculationConfig(model=long, tokens=4, adaptive=False)
    engine = EngineConfig(token_budget=64, speculation=speculation)
    cache = CacheConfig(max_sequences=2)

    def request(prompt, most):
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0)
        return Request(prompt=prompt, params=params, seed=most, stop_ids=())

    with LLM(long, engine=engine, max_model_len=2048, cache=cache, progress=False) as llm:
        drafter, row = llm.engine.speculation.drafter, DraftModel._row
        assert drafter._shapes.lengths[0] == 512
        # Drawn with other random numbers, most drafts are rejected.
        drafter._row = lambda *given, **told: replace(row(*given, **told), seed=9)
        [first] = llm.engine.add([request(tuple(range(50)) * 10, 20)])
        while first.status != FINISHED:
            llm.engine.step()
            if first.generated and not llm.engine.scheduler.waiting:
                # Its prompt comes between, so that the smaller model must catch up.
                llm.engine.add([request((1, 2, 3), 2)])
        assert first.error is None
        assert drafter._failures == 0


def test_drafts_with_other_random_numbers_are_right_less_often(alike, monkeypatch):
    """So the share of right drafts shows that they are drawn with the noise of their position."""
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    row, shares = DraftModel._row, []
    for shift in (0, 1):

        def shifted(sequence, *others, shift=shift, **options):
            made = row(sequence, *others, **options)
            return replace(made, seed=made.seed + shift)

        monkeypatch.setattr(DraftModel, "_row", staticmethod(shifted))
        before = alike.stats().speculation
        alike.generate(PROMPTS, sampling)
        after = alike.stats().speculation
        accepted, drafted = after.accepted[1], after.drafted[1]
        shares.append((accepted - before.accepted[1]) / (drafted - before.drafted[1]))
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
