"""Prompt lookup: the tokens behind the last earlier place that has the same last tokens."""

import gc

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.speculation.ngrams import NgramDrafter
from tests.engine.engines import request_of
from tests.example_counts import examples


def state_of(tokens):
    return RequestState(request=request_of(tokens[:1]), number=0, tokens=list(tokens))


def naive(tokens, longest, shortest, most):
    """Compares token by token."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tuple(tokens[start + length : start + length + most])
    return ()


# The bytes of these ids contain one another, at offsets that are no whole token.
IDS = st.sampled_from([0, 1, 256, 257, 65536, 16777216])


@settings(max_examples=examples(100))
@given(st.lists(IDS, min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3), st.data())
def test_guesses_are_those_of_a_comparison_token_by_token(tokens, shortest, more, data):
    """Also while the text grows, several tokens at a time."""
    drafter, longest = NgramDrafter(shortest + more, shortest), shortest + more
    state = state_of(tokens)
    for _ in range(3):
        most = data.draw(st.integers(1, 5))
        wanted = naive(state.tokens, longest, shortest, most)
        assert drafter.draft([state], [most]) == [wanted]
        state.tokens += data.draw(st.lists(IDS, max_size=3))


def test_the_longest_match_comes_first():
    state = state_of([1, 2, 3, 50, 9, 3, 60, 1, 2, 3])
    assert NgramDrafter(3, 1).draft([state], [2]) == [(50, 9)]
    assert NgramDrafter(1, 1).draft([state], [2]) == [(60, 1)]
    assert NgramDrafter(4, 4).draft([state], [2]) == [()]


def test_the_text_of_an_ended_request_is_dropped():
    drafter = NgramDrafter(2, 1)
    state = state_of([1, 2, 1])
    drafter.draft([state], [1])
    assert len(drafter._texts) == 1
    del state
    gc.collect()
    assert not drafter._texts
