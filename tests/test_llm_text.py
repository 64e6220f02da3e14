"""The text of answers is the same from every method, for a tokenizer that strips the space before a text."""

import asyncio
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxkv import LLM, AsyncLLM, CacheConfig, EngineConfig, SamplingParams
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One layer of the model inside the package with words for its ids, as SentencePiece would write them."""
    folder = one_layer_model(tmp_path_factory.mktemp("model") / "words")
    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    words = {f"▁w{number}": number for number in range(size)}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="▁w0"))
    library.add_special_tokens(["▁w0"])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    (folder / "tokenizer.json").write_text(library.to_str(pretty=True))
    return folder


@pytest.fixture(scope="module")
def llm(directory):
    cache = CacheConfig(max_sequences=3, page_size=16)
    # Two programs instead of one for each number of rows and of tokens, and for each kind of request.
    engine = EngineConfig(pinned_shapes=True, token_budget=64)
    return few_programs(
        LLM(
            directory, dtype="float32", max_model_len=64, cache=cache, engine=engine, progress=False
        )
    )


@pytest.fixture(scope="module")
def library(directory):
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def answer_of(library, output):
    """Returns the text of prompt and answer, less that of the prompt."""
    prompt = library.decode(output.prompt_token_ids)
    both = library.decode([*output.prompt_token_ids, *output.token_ids])
    assert both.startswith(prompt + " ")
    return both[len(prompt) :]


@pytest.mark.parametrize("prompt", ["w5 w6 w7", [5, 6, 7], [5]])
def test_the_space_between_prompt_and_answer_is_kept_from_every_door(llm, library, prompt):
    [output] = llm.generate(prompt, GREEDY)
    wanted = answer_of(library, output)
    assert output.text == wanted
    assert "".join(piece.text for piece in llm.stream(prompt, GREEDY)) == wanted

    async def user():
        async with AsyncLLM(llm) as served:
            whole = await served.generate(prompt, GREEDY)
            return whole.text, "".join(
                [piece.text async for piece in served.stream(prompt, GREEDY)]
            )

    assert asyncio.run(user()) == (wanted, wanted)


def test_each_of_several_samples_keeps_the_space(llm, library):
    params = SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True)
    [output] = llm.generate([5, 6], params)
    prompt = library.decode(output.prompt_token_ids)
    for sample in output.outputs:
        both = library.decode([*output.prompt_token_ids, *sample.token_ids])
        assert prompt + sample.text == both


def test_a_stop_string_is_looked_for_behind_the_space(llm):
    [whole] = llm.generate([5, 6, 7], GREEDY)
    first, second, *_ = whole.text.split()
    for stop, text in ((f" {first}", ""), (f"{first} {second}", " ")):
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=stop)
        [output] = llm.generate([5, 6, 7], params)
        assert (output.text, output.finish_reason) == (text, "stop")
        assert "".join(piece.text for piece in llm.stream([5, 6, 7], params)) == text


def test_the_stop_string_is_in_the_text_if_it_is_included(llm):
    [whole] = llm.generate([5, 6, 7], GREEDY)
    stop = whole.text.split()[1]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        stop=stop,
        include_stop_str_in_output=True,
    )
    text = whole.text[: whole.text.index(stop) + len(stop)]
    assert llm.generate([5, 6, 7], params)[0].text == text
    assert "".join(piece.text for piece in llm.stream([5, 6, 7], params)) == text


def test_special_tokens_have_text_if_they_are_not_skipped(llm):
    params = {"temperature": 0.0, "max_tokens": 2, "logit_bias": {0: 100}}
    shown = SamplingParams(**params, skip_special_tokens=False)
    for wish, text in ((SamplingParams(**params), ""), (shown, " w0")):
        [output] = llm.generate([5, 6], wish)
        assert (output.text, output.token_ids, output.finish_reason) == (text, [0], "stop")
        assert "".join(piece.text for piece in llm.stream([5, 6], wish)) == text


def test_a_bad_word_is_never_generated_however_likely_it_is(llm):
    likely = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logit_bias": {9: 100}}
    assert llm.generate([5, 6], SamplingParams(**likely))[0].text == " w9 w9 w9 w9"
    outputs = llm.generate([[5, 6]] * 2, SamplingParams(**likely, bad_words=["w9"], n=2))
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason == "length"
            assert 9 not in sample.token_ids
    hot = SamplingParams(temperature=100.0, seed=3, max_tokens=32, top_k=2, logit_bias={9: 100})
    assert 9 in llm.generate([5, 6], hot)[0].token_ids
    assert 9 not in llm.generate([5, 6], replace(hot, bad_words=("w9",)))[0].token_ids
