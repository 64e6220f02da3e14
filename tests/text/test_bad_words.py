"""Words of one token are never generated; others are refused, and named by their tokens."""

import math

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxkv import default_model
from jaxkv.config.sampling import SamplingParams
from jaxkv.text.bad_words import forbid_words
from jaxkv.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(default_model.path())


def with_spaced_words():
    """A byte-level tokenizer with the tokens "ab" and " ab"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: at for at, piece in enumerate([*alphabet, "ab", "Ġab"])}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "ab")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(library)


def test_a_word_is_forbidden_at_the_start_and_behind_a_space():
    tokenizer = with_spaced_words()
    params = SamplingParams(bad_words=("ab",), logit_bias={7: 1.0, 256: 50.0})
    made = forbid_words(params, tokenizer)
    assert made.bad_words == ()
    assert made.logit_bias == {7: 1.0, 256: -math.inf, 257: -math.inf}
    assert forbid_words(made, tokenizer) is made


def test_a_word_of_several_tokens_is_refused_and_its_tokens_are_named():
    word = "antidisestablishment"
    ids = TOKENIZER.encode(word)
    assert len(ids) > 1
    with pytest.raises(ValueError, match=rf"has {len(ids)}; .* \[{ids[0]}, .*logit_bias") as caught:
        forbid_words(SamplingParams(bad_words=[word]), TOKENIZER)
    assert "\n" not in str(caught.value)


def test_without_a_tokenizer_the_error_tells_how_to_write_one():
    with pytest.raises(ValueError, match=r"bad_words need a tokenizer: .*copy the"):
        forbid_words(SamplingParams(bad_words="x"), None)
