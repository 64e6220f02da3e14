"""No fallback is silent: it has a reason, a count, and one line in the log."""

import logging

import pytest

from pallas_kernels.dispatch import Unsupported, asking, at, choose, fallbacks


def test_a_fallback_is_logged_once_and_counted_each_time(caplog):
    reasons = {"fast": lambda: "no such unit here", "plain": lambda: None}
    key = ("an_op", "fast", "no such unit here")
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert [choose("an_op", reasons, None) for _ in range(3)] == ["plain"] * 3
        assert choose("an_op", reasons, "plain") == "plain"
    assert len(caplog.records) == 1
    assert "no such unit here" in caplog.text
    assert fallbacks()[key] == 3


REASONS = {"fast": lambda: "too odd", "plain": lambda: None, "theirs": lambda: None}


def test_questions_are_noted_with_their_place_and_are_no_fallbacks():
    before = fallbacks()
    with asking() as questions:
        assert choose("an_op", REASONS, None) == "theirs"
        with at("layer 3"):
            assert choose("an_op", REASONS, "plain", by_name=["theirs"]) == "plain"
    assert [question.place for question in questions] == ["", "layer 3"]
    assert questions[1].refusals == {"fast": "too odd", "plain": None, "theirs": None}
    assert fallbacks() == before
    assert choose("an_op", REASONS, None) == "plain"
    assert len(questions) == 2


def test_a_question_that_no_implementation_could_answer_is_refused_like_a_call():
    reasons = {"fast": lambda: "too odd", "theirs": lambda: None}
    with asking() as questions, pytest.raises(Unsupported, match="fast: too odd"):
        choose("an_op", reasons, None, by_name=["theirs"])
    assert len(questions) == 1


def test_what_runs_only_by_name_is_not_taken_without_one():
    reasons = {"fast": lambda: "too odd", "theirs": lambda: None}
    with pytest.raises(Unsupported, match="fast: too odd"):
        choose("an_op", reasons, None, by_name=["theirs"])
    assert choose("an_op", reasons, "theirs", by_name=["theirs"]) == "theirs"
