"""On a GPU: an EAGLE-3 head on our kernels is right about a model that it knows, and changes no bit."""

import numpy as np
import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig
from tests.models.draft_heads import copycats

pytestmark = pytest.mark.gpu

SIZES = copycats.Sizes(width=512, ffn=512, vocab=512, drafted=448)


def test_a_head_that_knows_the_model_is_right_on_our_kernels(tmp_path):
    """In bfloat16, with greedy and drawn rows, prompts in chunks, hits and preemptions."""
    dtype = {"torch_dtype": "bfloat16", "max_position_embeddings": 512}
    copycats.llama(tmp_path / "model", SIZES, **dtype)
    copycats.eagle3(tmp_path / "head", tmp_path / "model", SIZES)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, SIZES.vocab, size).tolist() for size in (300, 7, 90, 140)]
    samplings = [
        SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=64, ignore_eos=True)
        for at in range(len(prompts))
    ]
    # Four sequences need more pages of hidden states and the rest than these.
    options = {"cache": CacheConfig(max_sequences=4, page_size=64, budget_bytes=9 * 2**20)}
    options |= {"engine": EngineConfig(token_budget=128, batch_invariant=True)}
    options |= {"max_model_len": 512, "progress": False}
    head = SpeculationConfig(method="eagle3", model=tmp_path / "head", tokens=4, adaptive=False)
    with LLM(tmp_path / "model", **options) as llm:
        wanted = [one.token_ids for one in llm.generate(prompts, samplings)]
    with LLM(tmp_path / "model", speculation=head, **options) as llm:
        assert llm.engine.runner.implementation.name == "mosaic_gpu"
        drafter = llm.engine.speculation.drafter
        assert drafter._runner.implementation.name == "mosaic_gpu"
        served = [llm.generate(prompts, samplings) for _ in range(2)]
        for outputs in served:
            assert [one.token_ids for one in outputs] == wanted
        assert sum(one.usage.preemptions for outputs in served for one in outputs) > 0
        stats = llm.stats().speculation
        assert drafter._failures == 0
    # One draft of a request's first step repeats its last token.
    assert stats.accepted[1] > 0.8 * stats.drafted[1], stats
