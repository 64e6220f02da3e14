"""Texts of calls: stop strings, finish reasons and counts, against a fake engine."""

import asyncio

import pytest

from jaxkv import SamplingParams, default_model
from jaxkv.serve.generation import Generation, generate
from jaxkv.text.tokenizer import load_tokenizer
from tests.serve.fake_engine import fake_engine

TOKENIZER = load_tokenizer(default_model.path())
PROMPT = TOKENIZER.encode("def ")
TEXT = "add(a, b):\n    return a + b\n"


def answer(text, params, held=False):
    """Returns all deltas of a call whose engine generates `text`, and its counts."""
    ids = TOKENIZER.encode(text, add_special=False)

    async def test():
        async with fake_engine(lambda submit: ids) as fake:
            made = generate(fake.client, TOKENIZER, PROMPT, params)
            found = []
            while new := await made.deltas():
                found += new
            return found, made.counts, fake

    return asyncio.run(asyncio.wait_for(test(), 30))


def text_of(deltas, sample=0):
    return "".join(delta.text for delta in deltas if delta.sample == sample)


def test_deltas_joined_are_the_text():
    deltas, counts, _ = answer(TEXT, SamplingParams(max_tokens=99))
    assert text_of(deltas) == TEXT
    assert deltas[-1].finish_reason == "stop"
    assert counts.prompt_tokens == len(PROMPT)
    assert counts.output_tokens == sum(len(delta.ids) for delta in deltas)
    assert counts.arrived <= counts.first_token <= counts.finished


def test_a_stop_string_ends_the_text_and_the_sample_in_the_engine():
    deltas, counts, fake = answer(TEXT, SamplingParams(max_tokens=99, stop=["return"]))
    assert text_of(deltas) == "add(a, b):\n    "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "return")
    assert all(not call.sampling.get("stop") for call in fake.calls.values())
    assert counts.output_tokens <= len(TOKENIZER.encode(TEXT, add_special=False))


def test_the_limit_of_tokens_is_a_length():
    deltas, counts, _ = answer(TEXT, SamplingParams(max_tokens=3))
    assert deltas[-1].finish_reason == "length"
    assert counts.output_tokens == 3


def test_samples_have_texts_of_their_own():
    deltas, counts, _ = answer(TEXT, SamplingParams(max_tokens=99, n=3))
    assert [text_of(deltas, sample) for sample in range(3)] == [TEXT] * 3
    assert {delta.sample for delta in deltas if delta.finish_reason} == {0, 1, 2}
    assert counts.output_tokens == 3 * len(TOKENIZER.encode(TEXT, add_special=False))


def test_a_stop_id_is_the_stop_reason():
    last = TOKENIZER.encode(TEXT, add_special=False)[-1]
    deltas, _, _ = answer(TEXT, SamplingParams(max_tokens=99, stop_token_ids=[last]))
    assert deltas[-1].stop_reason == last


def test_logprobs_belong_to_the_ids():
    deltas, _, _ = answer(TEXT, SamplingParams(max_tokens=99, logprobs=1, stop=["return"]))
    assert all(len(delta.ids) == len(delta.logprobs) for delta in deltas)
    assert all(
        token in table for d in deltas for token, table in zip(d.ids, d.logprobs, strict=True)
    )


def test_an_id_without_text_fails_its_call_alone():
    async def test():
        async with fake_engine(lambda submit: [4_000_000, 5]) as fake:
            made = Generation(
                fake.client.submit(PROMPT, SamplingParams()), TOKENIZER, PROMPT, SamplingParams()
            )
            [delta, *_] = await made.deltas()
            assert delta.finish_reason == "error"
            assert await made.deltas() == []

    asyncio.run(asyncio.wait_for(test(), 30))


def test_an_aborted_generation_ends():
    async def test():
        async with fake_engine(held=True) as fake:
            made = generate(fake.client, TOKENIZER, PROMPT, SamplingParams(stop=["x"]))
            made.abort()
            assert await made.deltas() == []

    asyncio.run(asyncio.wait_for(test(), 30))


def test_stop_strings_without_a_tokenizer_are_refused():
    async def test():
        async with fake_engine() as fake:
            with pytest.raises(ValueError, match="tokenizer"):
                generate(fake.client, None, [1], SamplingParams(stop=["x"]))

    asyncio.run(test())
