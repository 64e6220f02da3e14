"""Where structured output begins behind reasoning, and which tokens may come before it."""

import numpy as np
import pytest

from jaxkv import ReasoningTokens, StructuredOutputs, default_model
from jaxkv.structured.form_start import FormStart
from jaxkv.structured.grammar import TokenConstraint
from jaxkv.structured.grammars import Grammars
from jaxkv.text.tokenizer import load_tokenizer

BEGIN, END, OTHER, CHANNEL, FINAL, TEXT_END = 4000, 4001, 4002, 4003, 4004, 0


def begins_at(generated, **tokens):
    """Returns where the form begins, asked after every token."""
    start = FormStart(ReasoningTokens(**tokens))
    found = [start.find(generated[:index]) for index in range(len(generated) + 1)]
    assert found[-1] == FormStart(ReasoningTokens(**tokens)).find(generated)
    return found[-1]


def test_a_form_begins_behind_the_first_end():
    assert begins_at([5, 6], ends=[END]) is None
    assert begins_at([5, END, 7, END], ends=[END]) == 2
    assert begins_at([OTHER, END], ends=[END, OTHER]) == 1


def test_a_form_begins_at_once_unless_the_text_begins_with_reasoning():
    assert begins_at([], ends=[END], begins=[BEGIN]) is None
    assert begins_at([5, BEGIN, END], ends=[END], begins=[BEGIN]) == 0
    assert begins_at([BEGIN, 5, END, 6], ends=[END], begins=[BEGIN]) == 3
    assert begins_at([BEGIN, 5], ends=[END], begins=[BEGIN]) is None


def test_an_end_counts_only_right_behind_its_header():
    tokens = {"ends": [END], "header": [CHANNEL, FINAL]}
    assert begins_at([END, 5, CHANNEL, OTHER, END], **tokens) is None
    assert begins_at([CHANNEL, FINAL, 5, END], **tokens) is None
    assert begins_at([FINAL, END], **tokens) is None
    assert begins_at([CHANNEL, 5, END, CHANNEL, FINAL, END, 6], **tokens) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ends": []}, "ends is empty"),
        ({"ends": [-1]}, "a token id of ends must be an int"),
        ({"ends": ["</think>"]}, "a token id of ends must be an int"),
        ({"ends": "</think>"}, "ends must be a list of token ids"),
        ({"ends": [1], "header": [1] * 65}, "the number of ids in header must be"),
    ],
)
def test_ids_that_are_none_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ReasoningTokens(**wrong)


def test_outputs_refuse_reasoning_that_is_none_and_reasoning_without_a_form():
    with pytest.raises(ValueError, match=r"reasoning must be ReasoningTokens\(...\)"):
        StructuredOutputs(regex="a", reasoning=[1])
    with pytest.raises(ValueError, match="exactly one of json, json_object, regex"):
        StructuredOutputs(reasoning=ReasoningTokens(ends=[1]))


@pytest.fixture(scope="module")
def grammar():
    grammars = Grammars(load_tokenizer(default_model.path()), (TEXT_END,), 4096)
    outputs = StructuredOutputs(regex="ab?")
    yield grammars.compile(outputs)
    grammars.close()


@pytest.fixture(scope="module")
def ids():
    tokenizer = load_tokenizer(default_model.path())
    return lambda text: tokenizer.encode(text, add_special=False)


def allowed(constraint):
    bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def settled(constraint, generated):
    """Computes and takes the mask behind the reasoning."""
    assert not constraint.stays_free(generated)
    assert not constraint.ends(generated)
    masks = np.zeros((1, constraint.grammar.forbidden.size), np.uint32)
    constraint.grammar.fill([constraint.matcher], masks)
    assert not constraint.settle(masks[0], generated)


def test_all_tokens_but_the_end_of_the_text_may_follow_in_the_reasoning(grammar, ids):
    constraint = TokenConstraint(grammar, reasoning=ReasoningTokens(ends=[END]), never=[7])
    everything = set(range(4096)) - {TEXT_END, 7}
    assert allowed(constraint) == everything
    assert constraint.stays_free(ids("b"))
    assert constraint.is_ready(1)
    assert allowed(constraint) == everything
    assert constraint.forced(ids("b")) == []
    settled(constraint, [*ids("b"), END])
    assert allowed(constraint) == {*ids("a"), *ids("ab")}
    assert constraint.ends([*ids("b"), END, *ids("a"), *ids("b")])


def test_the_first_token_begins_reasoning_or_the_form(grammar, ids):
    tokens = ReasoningTokens(ends=[END], begins=[BEGIN])
    constraint = TokenConstraint(grammar, reasoning=tokens)
    assert allowed(constraint) == {BEGIN, *ids("a"), *ids("ab")}
    settled(constraint, ids("a"))
    assert allowed(constraint) == {TEXT_END, *ids("b")}
    constraint = TokenConstraint(grammar, reasoning=tokens)
    assert constraint.stays_free([BEGIN])
    settled(constraint, [BEGIN, 5, END, *ids("a")])
    assert allowed(constraint) == {TEXT_END, *ids("b")}


def test_nothing_comes_between_a_header_and_its_end(grammar):
    tokens = ReasoningTokens(ends=[END], header=[CHANNEL, FINAL])
    constraint = TokenConstraint(grammar, reasoning=tokens)
    assert constraint.stays_free([END, CHANNEL])
    assert len(allowed(constraint)) == 4095
    assert constraint.stays_free([END, CHANNEL, FINAL])
    assert allowed(constraint) == {END}


def test_reasoning_without_a_token_left_is_an_error(grammar):
    constraint = TokenConstraint(
        grammar, reasoning=ReasoningTokens(ends=[END]), before_least=range(4096), least=5
    )
    with pytest.raises(ValueError, match="leave no token after 1 tokens"):
        constraint.stays_free([5])


def test_requests_with_and_without_reasoning_share_a_grammar():
    grammars = Grammars(load_tokenizer(default_model.path()), (TEXT_END,), 4096)
    plain = grammars.compile(StructuredOutputs(regex="abc"))
    after = StructuredOutputs(regex="abc", reasoning=ReasoningTokens(ends=[END]))
    assert grammars.compile(after) is plain
    grammars.close()
