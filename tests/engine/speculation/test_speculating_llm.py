"""An `LLM` with prompt lookup: strict, warmed up, and equal bit for bit to one without."""

import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig

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
