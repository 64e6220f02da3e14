"""An `LLM` with prompt lookup: strict, warmed up, and equal bit for bit to one without."""

import jax
import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig, default_model
from tests.few_programs import few_programs
from tests.models.recurrent_model import recurrent_model

PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n", "x = 1\nx = 1\nx = "]
WAYS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 4, "stop": ["\n\n\n"], "logprobs": 2},
}


def served(sampling, **options):
    """Returns what two prompts give under strict mode, after a warm-up, and the statistics."""
    options |= {"max_model_len": 128, "cache": CacheConfig(max_sequences=2)}
    engine = EngineConfig(token_budget=32, batch_invariant=True)
    with LLM(strict=True, progress=False, engine=engine, **options) as llm:
        llm.warm_up(batch=2, prompt_tokens=40, sampling=sampling)
        outputs = llm.generate(PROMPTS, sampling)
        stats = llm.stats()
    told = [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in outputs]
    return told, stats


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_prompt_lookup_takes_fewer_steps_to_the_same_output(way):
    sampling = SamplingParams(max_tokens=48, ignore_eos=True, **WAYS[way])
    wanted, plain = served(sampling)
    config = SpeculationConfig(tokens=4, shortest_ngram=1, adaptive=False)
    got, stats = served(sampling, speculation=config)
    assert got == wanted
    assert stats.steps < plain.steps
    assert stats.compiled_late == 0
    assert sum(stats.speculation.accepted) > 10
    # The device looks the next drafts up itself.
    assert stats.speculation.overlapped > 5
    assert plain.speculation is None


def alone(speculation, *, batch_invariant):
    """Returns what one row of a model with every recurrent block gives, and statistics.

    With drafts its programs are those of a warm-up of one row.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    model, params = recurrent_model()
    # Small weights make texts with repetitions, so that some drafts are right and others wrong.
    params = jax.tree.map(lambda leaf: leaf * 0.35 if leaf.ndim > 1 else leaf, params)
    engine = EngineConfig(
        token_budget=16,
        batch_invariant=batch_invariant,
        speculation=speculation,
        prefix_cache=False,
    )
    options = {"cache": CacheConfig(max_sequences=1, page_size=8), "max_model_len": 64}
    options |= {"tokenizer": default_model.path(), "eos_ids": (), "progress": False}
    options["strict"] = speculation is not None
    with few_programs(LLM.from_parts(model, params, engine=engine, **options)) as llm:
        if speculation is not None:
            llm.warm_up(batch=1, prompt_tokens=16, sampling=sampling)
        [output] = llm.generate([{"prompt_token_ids": [5, 6, 7, 8] * 4}], sampling)
        return output.token_ids, llm.stats().speculation


@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_row_with_recurrent_states_verifies_drafts(batch_invariant):
    """XLA writes one row in another way than several, and once copied the states for it."""
    wanted, _ = alone(None, batch_invariant=batch_invariant)
    config = SpeculationConfig(tokens=3, shortest_ngram=1, adaptive=False)
    got, stats = alone(config, batch_invariant=batch_invariant)
    assert got == wanted
    assert 10 < sum(stats.accepted) < sum(stats.drafted)
    assert stats.overlapped > 0
