"""A view of generated tokens reads as the list of them does, and grows with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.structured.generated_tokens import GeneratedTokens

BOUNDS = st.none() | st.integers(-9, 9)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3), BOUNDS, BOUNDS)
def test_it_reads_as_the_list_after_the_prompt(answer, prompt, start, stop):
    tokens = [*range(100, 100 + prompt), *answer]
    view = GeneratedTokens(tokens, prompt)
    assert list(view) == answer
    assert view[start:stop] == answer[start:stop]
    assert view[start:stop:2] == answer[start:stop:2]
    assert [view[-1 - place] for place in range(len(answer))] == answer[::-1]
    for beyond in (len(answer), -len(answer) - 1):
        with pytest.raises(IndexError):
            view[beyond]


def test_it_grows_with_the_list():
    tokens = [7, 8]
    view = GeneratedTokens(tokens, 2)
    assert len(view) == 0
    tokens.append(5)
    assert list(view) == [5]
