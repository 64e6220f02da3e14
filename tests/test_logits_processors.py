"""Logits processors of an `LLM`: every way to ask for one, beside other options, and the errors of each."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, AsyncLLM, CacheConfig, EngineConfig, SamplingParams, StructuredOutputs
from jaxkv.programs.manifest import compile_count
from tests.sampling.processors import FUNCTIONS, processed

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
CACHE = CacheConfig(max_sequences=4, page_size=16)


def with_processors(params=GREEDY, **calls):
    values = {name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos")}
    return SamplingParams(**values, logits_processors=calls)


DIGEST = with_processors(digest={"factor": 5})


@pytest.fixture(scope="module")
def llm():
    with LLM(
        dtype="float32",
        max_model_len=64,
        cache=CACHE,
        engine=EngineConfig(token_budget=32),
        progress=False,
        logits_processors=FUNCTIONS,
    ) as made:
        yield made


def by_numpy(llm, prompt, calls, count=10):
    """What `digest` alone decides."""
    tokens = list(prompt)
    for _ in range(count):
        blank = np.zeros(llm.model.vocab_size)
        tokens.append(int(processed(blank, calls, tokens, len(prompt)).argmax()))
    return tokens[len(prompt) :]


def test_generate_stream_and_async_calls_have_the_same_tokens(llm):
    ids = llm.tokenizer.encode(PROMPT)
    wanted = by_numpy(llm, ids, DIGEST.logits_processors)
    [whole] = llm.generate(PROMPT, DIGEST)
    assert whole.token_ids == wanted
    assert [piece.token_id for piece in llm.stream(PROMPT, DIGEST)] == wanted
    options = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    [named] = llm.generate(PROMPT, **options, logits_processors=DIGEST.logits_processors)
    assert named.token_ids == wanted

    async def serve():
        async with AsyncLLM(llm) as served:
            several = [served.generate(PROMPT, DIGEST), served.generate(PROMPT, GREEDY)]
            return [output.token_ids for output in await asyncio.gather(*several)]

    [plain] = llm.generate(PROMPT, GREEDY)
    assert asyncio.run(serve()) == [wanted, plain.token_ids]
    assert plain.token_ids != wanted


def test_samples_of_a_prompt_share_its_pages_and_have_histories_of_their_own(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=8, logits_processors={"digest": {"factor": 5}})
    [output] = llm.generate(PROMPT, params)
    wanted = by_numpy(llm, output.prompt_token_ids, params.logits_processors, 8)
    assert [sample.token_ids for sample in output.outputs] == [wanted] * 3


def test_a_grammar_wins_over_a_processor(llm):
    """A processor may choose among the tokens that the grammar allows, and breaks it never."""
    free, held = (
        SamplingParams(
            temperature=0.0,
            max_tokens=20,
            structured_outputs=StructuredOutputs(regex="[a-c]{6}"),
            logits_processors=calls,
        )
        for calls in ({}, {"no_repeat_ngram": {"size": 1}, "scaled": {"negative": True}})
    )
    texts = [llm.generate(PROMPT, params)[0].text for params in (free, held)]
    assert all(set(text) <= set("abc") and len(text) == 6 for text in texts)
    assert texts[0] != texts[1]


def test_log_probabilities_are_those_of_the_raw_logits(llm):
    options = {"temperature": 0.0, "max_tokens": 1, "logprobs": 2}
    calls = {"allowed_range": {"low": 300, "high": 301}}
    [plain] = llm.generate(PROMPT, SamplingParams(**options))
    [bent] = llm.generate(PROMPT, SamplingParams(**options, logits_processors=calls))
    assert bent.token_ids == [300]
    top = set(plain.logprobs[0])
    assert top <= set(bent.logprobs[0]) == top | {300}
    for token in top:
        np.testing.assert_allclose(bent.logprobs[0][token], plain.logprobs[0][token], atol=1e-5)


def test_a_processor_that_leaves_no_token_fails_its_request_alone(llm):
    nothing = with_processors(allowed_range={"low": 5, "high": 5})
    bad, good = llm.generate([PROMPT, PROMPT], [nothing, DIGEST])
    assert bad.finish_reason == "error"
    assert "not finite" in bad.error
    assert good.token_ids == by_numpy(llm, good.prompt_token_ids, DIGEST.logits_processors)


def test_wrong_names_and_arguments_are_refused_before_anything_runs(llm):
    for calls, message in (
        ({"other": {}}, r"'other', which is not registered; registered are: scaled, digest"),
        ({"digest": {"other": 1}}, "'digest' has no argument 'other'; it has factor"),
        ({"digest": {"factor": [1]}}, r"must be int32\[\], got int32\[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(PROMPT, logits_processors=calls)
        with pytest.raises(ValueError, match=message):
            llm.stream(PROMPT, with_processors(**calls))


def test_the_histories_are_a_part_of_the_budget(llm):
    group = next(group for group in llm.layout.groups if group.name == "sampling")
    shapes = {array.role: array.shape for array in group.spec.arrays}
    assert shapes["token_history"] == (64,)
    live = llm.engine.runner.cache
    held = sum(array.nbytes for array in live.arrays)
    assert held == llm.budget.bytes
    with LLM(dtype="float32", max_model_len=64, cache=CACHE, progress=False) as bare:
        words = llm.engine.runner.processors.num_words
        assert held - bare.budget.bytes == (CACHE.max_sequences + 1) * 4 * (64 + words)


def test_a_function_that_cannot_run_in_a_step_is_refused_when_it_is_registered():
    with pytest.raises(ValueError, match="the logits processor 'mine' must return"):
        LLM(
            max_model_len=64,
            progress=False,
            logits_processors={"mine": lambda logits, history: jnp.sum(logits)},
        )


def test_a_strict_llm_that_is_warmed_up_for_one_processor_serves_all_without_compiling():
    with LLM(
        dtype="float32",
        max_model_len=64,
        cache=CACHE,
        engine=EngineConfig(token_budget=16),
        strict=True,
        progress=False,
        logits_processors=FUNCTIONS,
    ) as llm:
        llm.warm_up(batch=3, prompt_tokens=8, sampling=DIGEST)
        before = compile_count()
        prompts = [[1] * 8, [2] * 5, [3]]
        for wishes in (
            [DIGEST, GREEDY, with_processors(scaled={"scale": 0.5})],
            [with_processors(digest={"factor": 2}, allowed_range={"low": 9}), DIGEST, GREEDY],
        ):
            for prompt, params, output in zip(
                prompts, wishes, llm.generate(prompts, wishes), strict=True
            ):
                if params is DIGEST:
                    assert output.token_ids == by_numpy(llm, prompt, DIGEST.logits_processors)
                assert output.finish_reason == "length"
        assert compile_count() == before
