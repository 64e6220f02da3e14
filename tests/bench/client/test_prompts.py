"""Texts have the wanted length by the server's own counts."""

import numpy as np
import pytest

from jaxkv.bench.client.prompts import TokenCounts, drawn_ids, drawn_texts, token_counts, words
from jaxkv.bench.workload import Workload


def test_a_text_once_and_twice_tells_the_frame_and_the_length_of_tokens():
    counts = token_counts("x" * 99, 35, 60)
    assert (counts.frame, counts.per_character) == (10, 0.25)
    assert counts.characters(60) == 200
    assert counts.characters(3) == 1
    assert (counts.tokens("x" * 8), counts.tokens("")) == (2, 1)


def test_counts_that_do_not_grow_are_refused():
    with pytest.raises(ValueError, match="no lengths can be planned"):
        token_counts("x", 5, 5)


def test_texts_have_the_characters_that_the_counts_ask_for():
    workload = Workload(requests=200, prompt_tokens=(50, 400), output_tokens=(1, 9))
    counts = TokenCounts(6.0, 0.25)
    texts = drawn_texts(workload, counts)
    wanted = workload.draw_lengths(np.random.default_rng(0))
    for (text, output), (prompt, asked) in zip(texts, wanted, strict=True):
        assert abs(len(text) - 4 * (prompt - 6)) <= 8
        assert output == asked
    assert texts == drawn_texts(workload, counts)
    assert len({text for text, _ in texts}) == 200


def test_texts_of_shared_prefix_begin_alike_and_then_differ():
    sizes = {"requests": 20, "prompt_tokens": (60, 80), "output_tokens": (1, 1)}
    workload = Workload(data="shared-prefix", prefix_tokens=40, **sizes)
    texts = [text for text, _ in drawn_texts(workload, TokenCounts(0.0, 0.25))]
    assert len({text[:150] for text in texts}) == 1
    assert len({text[175:] for text in texts}) == 20


def test_ids_are_those_of_the_workload():
    workload = Workload(requests=3, prompt_tokens=(2, 5), output_tokens=(1, 4))
    assert drawn_ids(workload, 9) == workload.draw_ids(9)


def test_words_are_counted():
    assert len(words(np.random.default_rng(0), 16).split()) == 16
