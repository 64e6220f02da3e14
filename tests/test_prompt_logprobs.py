"""`prompt_logprobs`: the log-probabilities of a prompt's tokens, against Transformers and `LLM.score`."""

import asyncio

import numpy as np
import pytest

from jaxkv import LLM, AsyncLLM, CacheConfig, SamplingParams
from jaxkv.errors import OutOfPages, ProgramRefused
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model):
    return few_programs(
        LLM(
            model,
            dtype="float32",
            max_model_len=64,
            cache=CacheConfig(max_sequences=2, page_size=16),
            progress=False,
        )
    )


def asked(top, **fields):
    return SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=top, **fields)


# Each number is a program: none, and the most that there are.
@pytest.mark.parametrize("top", [0, pytest.param(3, marks=pytest.mark.slow), 20])
def test_the_tables_have_each_token_and_the_most_likely_ones(llm, top):
    [output] = llm.generate(PROMPT, asked(top))
    ids, tables = output.prompt_token_ids, output.prompt_logprobs
    assert len(tables) == len(ids)
    assert tables[0] is None
    for token, table in zip(ids[1:], tables[1:], strict=True):
        assert token in table
        assert top <= len(table) <= top + 1
        assert sorted(table.values(), reverse=True)[:top] == list(table.values())[:top]
    scores = llm.score([ids])[0]
    given = [table[token] for token, table in zip(ids[1:], tables[1:], strict=True)]
    np.testing.assert_allclose(given, scores, rtol=1e-6)


@pytest.mark.torch
def test_the_tables_equal_those_of_transformers(llm, model):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    [output] = llm.generate(PROMPT, asked(5))
    theirs = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor([output.prompt_token_ids])).logits[0]
    wanted = torch.log_softmax(logits, -1)
    for position, table in enumerate(output.prompt_logprobs[1:]):
        values, ids = wanted[position].topk(5)
        assert list(table)[:5] == ids.tolist()
        np.testing.assert_allclose(list(table.values())[:5], values.numpy(), atol=1e-4)


def test_the_generated_tokens_and_other_outputs_stay_as_they_are(llm):
    plain, scored = llm.generate(
        [PROMPT, PROMPT], [SamplingParams(temperature=0.0, max_tokens=4), asked(2, n=2)]
    )
    assert plain.prompt_logprobs is None
    assert [each.token_ids for each in scored.outputs] == [plain.token_ids] * 2


def test_a_prompt_of_one_token_has_no_table(llm):
    assert llm.generate([[5]], asked(2))[0].prompt_logprobs == [None]


@pytest.mark.parametrize("top", [-1, 21, True, "3"])
def test_a_number_out_of_range_is_refused(top):
    with pytest.raises(ValueError, match="prompt_logprobs"):
        asked(top)


def test_a_stream_says_that_it_reports_none(llm):
    with pytest.raises(ValueError, match="prompt_logprobs"):
        llm.stream(PROMPT, asked(1))


@pytest.mark.slow
def test_strict_mode_needs_them_in_the_warm_up(model):
    strict = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        cache=CacheConfig(max_sequences=1, page_size=16),
        strict=True,
        progress=False,
    )
    with strict:
        strict.warm_up(batch=1, prompt_tokens=16, sampling=asked(None))
        with pytest.raises(ProgramRefused):
            strict.generate([[5] * 8], asked(5))
        strict.warm_up(batch=1, prompt_tokens=16, sampling=asked(5))
        assert len(strict.generate([[5] * 8], asked(5))[0].prompt_logprobs) == 8


def test_pages_that_a_stream_holds_are_waited_for_by_a_service(model):
    """The cache has room for one of them: the service scores the prompt once the other has ended."""
    tight = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        cache=CacheConfig(max_sequences=1, page_size=16),
        progress=False,
    )
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    async def both():
        async with AsyncLLM(tight) as served:
            first = asyncio.create_task(served.generate([7] * 30, long))
            while not tight.engine.scheduler.running:
                await asyncio.sleep(0.001)
            second = await served.generate([5] * 40, asked(1))
            left = asyncio.create_task(served.generate([7] * 30, long))
            while not tight.engine.scheduler.running:
                await asyncio.sleep(0.001)
            aborted = asyncio.create_task(served.generate([5] * 40, asked(1)))
            await asyncio.sleep(0.01)
            aborted.cancel()
            return await first, second, await left

    with tight:
        first, second, left = asyncio.run(asyncio.wait_for(both(), 120))
        assert first.token_ids == left.token_ids
        assert len(first.token_ids) == 30
        assert len(second.prompt_logprobs) == 40
        stats = tight.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        held = tight.stream([7] * 30, long)
        next(held)
        with pytest.raises(OutOfPages):
            tight.generate([[5] * 40], asked(1))
        held.close()
