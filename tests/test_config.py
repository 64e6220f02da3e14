"""Wishes out of range are refused when they are made, by name and with the range (reliability rows 18 and 19)."""

import pytest

from jaxkv.config import CacheConfig, SamplingParams

BAD_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, "7", None, 10**400]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, -0.1])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_number_that_is_none_or_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [*BAD_NUMBERS[:5], 1.5, -1, 2**63])
@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens", "n", "logprobs"])
def test_a_count_that_is_none_or_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "temperature=0"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (2**40,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"ignore_eos": 1}, "ignore_eos"),
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


@pytest.mark.parametrize(
    "options", [{"page_size": 0}, {"max_sequences": 0}, {"budget_bytes": 0}, {"memory_share": 1.5}]
)
def test_a_cache_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CacheConfig(**options)
