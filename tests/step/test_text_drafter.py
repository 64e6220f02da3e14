"""Prompt lookup on the device: the tokens behind the last earlier place that has the same last tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.step.text_drafter import NgramLookup, TextDrafter
from tests.example_counts import examples

WIDTH, MOST = 24, 6
JUNK = np.iinfo(np.int32).max

IDS = st.sampled_from([0, 1, 2, 511])
TEXTS = st.lists(st.lists(IDS, min_size=1, max_size=WIDTH), min_size=3, max_size=3)


@partial(jax.jit, static_argnums=(0, 3))
def drafts_of(lookup, texts, lengths, most):
    return lookup.draft(texts, lengths, most)


def drafted(lookup, texts, most=MOST):
    """Returns the guesses for some texts, with junk behind each."""
    padded = np.full((len(texts), WIDTH), JUNK, np.int32)
    for row, tokens in zip(padded, texts, strict=True):
        row[: len(tokens)] = tokens
    lengths = jnp.asarray([len(tokens) for tokens in texts], jnp.int32)
    return drafts_of(lookup, jnp.asarray(padded), lengths, most).tolist()


def naive(tokens, lookup, most):
    """Compares token by token, and repeats what lies between the two places."""
    for length in range(lookup.longest, lookup.shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                rest = tokens[start + length :]
                return [rest[at % len(rest)] for at in range(most)]
    return [tokens[-1]] * most


@settings(deadline=None, max_examples=examples(100))
@given(TEXTS, st.sampled_from([NgramLookup(1, 1), NgramLookup(3, 1), NgramLookup(4, 2)]))
def test_guesses_are_those_of_a_comparison_token_by_token(texts, lookup):
    assert drafted(lookup, texts) == [naive(tokens, lookup, MOST) for tokens in texts]


def test_the_longest_match_comes_first():
    text = [1, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    assert drafted(NgramLookup(3, 1), [text], 2) == [[50, 9]]
    assert drafted(NgramLookup(1, 1), [text], 2) == [[60, 1]]
    assert drafted(NgramLookup(4, 4), [text], 2) == [[3, 3]]


def test_padding_rows_have_ids_of_the_vocabulary():
    texts, lengths = jnp.zeros((2, WIDTH), jnp.int32), jnp.zeros(2, jnp.int32)
    assert drafts_of(NgramLookup(4, 2), texts, lengths, 3).tolist() == [[0] * 3] * 2


def test_lookups_are_keys_of_programs():
    assert isinstance(NgramLookup(4, 2), TextDrafter)
    assert NgramLookup(4, 2) == NgramLookup(4, 2) != NgramLookup(4, 1)
    assert len({NgramLookup(4, 2), NgramLookup(4, 2), NgramLookup(3, 2)}) == 2
