"""Options out of range raise an error on construction, with the option's name and range."""

import copy
import dataclasses
import math
import pickle
from collections import ChainMap
from types import MappingProxyType

import numpy as np
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.sampling import SamplingParams, kept_sampling

BAD_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, "7", None, 10**400]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, -0.1])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_number_that_is_none_or_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [*BAD_NUMBERS[:5], 1.5, -2, 2**63])
@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens", "n", "logprobs"])
def test_a_count_that_is_none_or_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "logprobs"])
def test_a_count_is_not_negative(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: -1})


def test_a_temperature_that_the_device_may_flush_to_zero_is_zero():
    """So such a request needs no program that draws."""
    assert SamplingParams(temperature=1e-38).temperature == 0.0
    assert SamplingParams(temperature=2.0**-126).temperature == 2.0**-126


def test_minus_one_keeps_all_tokens_as_zero_does_and_no_most_tokens_is_the_contexts_end():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(max_tokens=None, min_tokens=100).max_tokens is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "temperature=0"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens .* in \[0, 4\], got 5; max_tokens is 4"),
        ({"logprobs_mode": "processed"}, "raw, temperature, truncated, got 'processed'"),
        ({"logprobs_mode": "truncated", "temperature": 0.0}, "a greedy request draws from no"),
        (
            {"logprobs_mode": "temperature", "temperature": 1.17e-38},
            r"temperature 1\.17e-38 is greedy; give one of at least 2\*\*-126, or logprobs_mode='raw'",
        ),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**40,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"bad_words": (5,)}, "bad_words must hold strings"),
        ({"bad_words": 5}, "bad_words must be a string or a sequence"),
        ({"bad_words": ["x"] * 257}, "the number of bad_words"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be a bool"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be a bool"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": 5}, "stop_token_ids must be .* got 5"),
        ({"stop_token_ids": None}, "stop_token_ids must be .* got None"),
        ({"stop_token_ids": np.array(5)}, "stop_token_ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be an int .* got 'a'"),
        ({"stop_token_ids": (None,)}, "stop_token_ids must be an int .* got None"),
        ({"stop_token_ids": (1.0,)}, "stop_token_ids"),
        ({"stop_token_ids": ([1],)}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"),
        ({"stop_token_ids": (np.True_,)}, "stop_token_ids"),
        ({"logit_bias": None}, "logit_bias must map .* got None"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": {True: 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"logit_bias": {1.0: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: None}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"seed": np.float32(1)}, "jaxkv.generate takes arrays and tracers as seeds="),
        ({"top_p": np.float32("nan")}, "top_p"),
    ],
)
def test_lists_and_flags_are_checked_too(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_ids_are_checked_against_the_width_of_the_logits():
    with pytest.raises(ValueError, match="100"):
        SamplingParams(stop_token_ids=(99, 100)).check_vocab(100)
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={100: 1.0}).check_vocab(100)
    SamplingParams(stop_token_ids=(99,), logit_bias={99: 1.0}).check_vocab(100)


def test_a_request_cannot_be_changed_from_outside():
    bias = {1: 1.0}
    wish = SamplingParams(logit_bias=bias)
    bias[2] = 1.0
    assert dict(wish.logit_bias) == {1: 1.0}
    with pytest.raises(TypeError):
        wish.logit_bias[3] = 1.0


RICH = {
    "temperature": 0.5,
    "stop_token_ids": (3, 4),
    "logit_bias": {1: 2.5, 7: -100},
    "seed": 2**64 - 1,
}


@pytest.mark.parametrize(
    "clone",
    [
        lambda wish: SamplingParams(**RICH | {"logit_bias": {7: -100, 1: 2.5}}),
        lambda wish: SamplingParams(**dataclasses.asdict(wish)),
        lambda wish: dataclasses.replace(wish, max_tokens=16),
        copy.copy,
        copy.deepcopy,
        *(
            lambda wish, protocol=protocol: pickle.loads(pickle.dumps(wish, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_wishes_of_equal_values_are_equal_and_hash_alike_however_they_were_copied(clone):
    wish = SamplingParams(**RICH)
    other = clone(wish)
    assert other == wish
    assert len({other, wish}) == 1
    assert repr(other.logit_bias) in ("{1: 2.5, 7: -100.0}", "{7: -100.0, 1: 2.5}")
    assert other != SamplingParams(**RICH | {"logit_bias": {1: 2.5}})
    with pytest.raises(TypeError):
        other.logit_bias[3] = 1.0


@pytest.mark.parametrize("kind", [dict, MappingProxyType, ChainMap])
def test_any_mapping_biases_logits(kind):
    wish = SamplingParams(logit_bias=kind({5: 1.0}))
    assert wish.logit_bias == {5: 1.0}
    assert wish == SamplingParams(logit_bias={5: 1.0})


@pytest.mark.parametrize("of", [np.int32, np.int64, np.uint8])
def test_numpys_numbers_become_pythons(of):
    wish = SamplingParams(
        temperature=np.float32(0.5),
        stop_token_ids=np.array([1, 2], of),
        logit_bias={of(3): np.float64(1)},
        **{name: of(4) for name in ("seed", "top_k", "n", "max_tokens", "min_tokens", "logprobs")},
    )
    cache = CacheConfig(page_size=of(16), memory_share=np.float32(0.5))
    values = [*dataclasses.astuple(wish)[:7], *wish.stop_token_ids, *wish.logit_bias]
    values += [*wish.logit_bias.values(), wish.seed, wish.n, wish.max_tokens, wish.min_tokens]
    values += [wish.logprobs, cache.page_size, cache.memory_share]
    assert {type(value) for value in values} == {int, float}
    assert wish.stop_token_ids == (1, 2)
    assert wish.logit_bias == {3: 1.0}
    assert (wish.seed, wish.temperature, cache.page_size) == (4, 0.5, 16)


@pytest.mark.parametrize(
    "options", [{"page_size": 0}, {"max_sequences": 0}, {"budget_bytes": 0}, {"memory_share": 1.5}]
)
def test_a_cache_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CacheConfig(**options)


def test_a_single_bad_word_is_a_list_of_one_and_none_are_no_strings():
    assert SamplingParams(bad_words="x").bad_words == ("x",)
    assert SamplingParams(bad_words=None, stop=None) == SamplingParams()


def test_minus_infinity_forbids_a_token():
    wish = SamplingParams(logit_bias={3: np.float32("-inf")})
    assert wish.logit_bias == {3: -math.inf}
    assert type(wish.logit_bias[3]) is float


def test_parameters_that_were_given_lately_are_the_same_object():
    given = {"temperature": 0.5, "seed": 3}
    assert kept_sampling(given) == SamplingParams(**given)
    assert kept_sampling(dict(given)) is kept_sampling(given)
    assert kept_sampling(given | {"seed": 4}).seed == 4
    assert kept_sampling({"stop": ["a"]}) == SamplingParams(stop=("a",))
    kept_sampling({"n": 1})
    # Python's 1 and True are equal.
    with pytest.raises(ValueError, match="n must be an int"):
        kept_sampling({"n": True})
