"""Every form of prompts, conversations and parameters becomes one; what has no such form is refused by name."""

from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import SamplingParams
from jaxkv.text.prompts import (
    TokenizedPrompt,
    as_call,
    as_conversations,
    as_prompts,
    one_each,
    tokenize,
)

HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, np.int64(2)),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        jnp.array([1, 2]),
        {"prompt_token_ids": [1, 2], "cache_salt": None},
        MappingProxyType({"prompt_token_ids": np.array([1, 2])}),
    ],
)
def test_token_ids_may_be_lists_arrays_or_in_a_dict(prompt):
    for one in (as_prompts(prompt), as_prompts([prompt, prompt])):
        made = [tokenize(each, None, 10) for each in one]
        assert made == [TokenizedPrompt((1, 2))] * len(one)
        assert {type(token) for token in made[0].ids} == {int}


def test_an_array_of_two_dimensions_is_a_list_of_prompts():
    for of in (np, jnp):
        assert [
            tokenize(row, None, 10).ids for row in as_prompts(of.asarray([[1, 2], [3, 4]]))
        ] == [(1, 2), (3, 4)]


def test_a_dict_has_a_text_and_a_salt():
    class Words:
        def encode(self, text, *, max_tokens=None):
            return [len(word) for word in text.split()]

    prompt = {"prompt": "one three", "cache_salt": "mine"}
    ids = {"prompt": "one three", "prompt_token_ids": [7]}
    assert tokenize(prompt, Words(), 10) == TokenizedPrompt((3, 5), "one three", "mine")
    assert tokenize(ids, Words(), 10) == TokenizedPrompt((7,), "one three")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, '"prompt_token_ids"'),
        ({"prompt": None, "prompt_token_ids": None}, '"prompt_token_ids"'),
        ({"prompt": 7}, '"prompt_token_ids"'),
        ({"prompt": "x", "multi_modal_data": 1}, "'multi_modal_data'"),
        ({"prompt_token_ids": "x"}, "neither tokenizer.json"),
        ({"prompt_token_ids": 7}, "got int"),
        (np.array(7), "got ndarray"),
        (np.array([1.5]), "token ids must be ints, got"),
        (jnp.zeros((2, 2), jnp.int32), "token ids must be ints, got"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        tokenize(prompt, None, 10)


def test_a_conversation_is_a_text_or_messages_and_several_are_a_list():
    assert as_conversations("hi") == ([[HI]], False)
    assert as_conversations([HI, HI]) == ([[HI, HI]], False)
    assert as_conversations([[HI], (HI, HI)]) == ([[HI], [HI, HI]], True)
    assert as_conversations(["hi"]) == ([[HI]], True)


@pytest.mark.parametrize("messages", [[], [[]], [HI, "hi"], [[HI], HI], [1], [b"hi"]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(ValueError, match="a conversation is a text or a non-empty list"):
        as_conversations(messages)


def test_fields_of_sampling_params_and_names_of_vllm_are_arguments_of_a_call():
    wish = SamplingParams(max_tokens=3)
    given = {"sampling": None, "progress": None}
    assert as_call("f", {"max_tokens": 3}, **given) == {"sampling": wish, "progress": None}
    assert as_call("f", {"sampling_params": wish, "use_tqdm": False}, **given) == {
        "sampling": wish,
        "progress": False,
    }
    assert as_call("f", {"cache_salt": "x"}, salt=None) == {"salt": "x"}


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (
            {"max_token": 3},
            {"sampling": None},
            "f has no option 'max_token'; the closest is max_tokens",
        ),
        ({"use_tqdm": True}, {"sampling": None}, "f has no option 'use_tqdm'"),
        ({"max_tokens": 3}, {"salt": None}, "f has no option 'max_tokens'"),
        ({"best_of": 2}, {"sampling": None}, "n samples"),
        ({"use_tqdm": True}, {"progress": True}, "progress and use_tqdm are one option"),
        ({"max_tokens": 3}, {"sampling": SamplingParams()}, r"write SamplingParams\(max_tokens="),
        (
            {"max_tokens": 3, "sampling_params": SamplingParams()},
            {"sampling": None},
            r"write SamplingParams\(max_tokens=",
        ),
        ({"max_tokens": 0}, {"sampling": None}, "max_tokens must be an int"),
    ],
)
def test_an_argument_that_is_unknown_or_given_twice_is_refused(options, given, message):
    with pytest.raises(ValueError, match=message):
        as_call("f", options, **given)


def test_parameters_are_one_for_all_or_one_each():
    one, two = SamplingParams(n=1), SamplingParams(n=2)
    assert one_each(None, 2) == [SamplingParams()] * 2
    assert one_each(two, 2) == [two, two]
    assert one_each((one, two), 2) == [one, two]
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        one_each([one, two], 3)


def test_without_a_tokenizer_the_error_about_a_text_tells_what_to_copy():
    with pytest.raises(
        ValueError, match=r"no tokenizer: .*tokenizer\.model; copy .*give token ids"
    ):
        tokenize("a text", None, 10)
