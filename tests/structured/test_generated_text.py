"""`LLM` with grammars on the model in the package: valid texts, and other requests that keep their tokens."""

import contextlib
import json
import math
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import jsonschema_rs
import numpy as np
import pytest

import jaxkv
from jaxkv import (
    LLM,
    CacheConfig,
    EngineConfig,
    ReasoningTokens,
    SamplingParams,
    StructuredOutputs,
)
from jaxkv.errors import ProgramRefused
from jaxkv.structured import grammars, trial
from jaxkv.structured.grammar import TokenConstraint
from tests.one_layer import one_layer_model
from tests.structured.schemas import draw_schemas

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 500},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
PINNED = {
    "dtype": "float32",
    "max_model_len": 256,
    "cache": CacheConfig(max_sequences=4, page_size=16),
    # Two programs to compile.
    "engine": EngineConfig(token_budget=8, pinned_shapes=True),
    "progress": False,
}


def constrained(params=GREEDY, **outputs):
    return replace(params, structured_outputs=StructuredOutputs(**outputs))


@pytest.fixture(scope="module")
def optimised():
    """Compiles as users do: few programs here, which run a thousand times (compare tests/conftest.py)."""
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def llm(optimised, one_layer):
    with LLM(one_layer, **PINNED) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    yield
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert [group.used for group in stats.cache] == [0] * len(stats.cache)


def assert_all_valid(llm, schemas):
    params = SamplingParams(temperature=0.7, max_tokens=240, seed=3)
    wishes = [constrained(params, json=schema) for schema in schemas]
    outputs = llm.generate(["x = "] * len(schemas), wishes)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason == "stop", (schema, output)
        assert jsonschema_rs.is_valid(schema, json.loads(output.text)), (schema, output.text)
    return outputs


def test_texts_follow_generated_schemas(llm):
    schemas = draw_schemas(8)
    assert len({output.text for output in assert_all_valid(llm, schemas)}) > 3


@pytest.mark.slow
def test_texts_follow_two_hundred_generated_schemas(optimised):
    """With all layers of the model, whose texts end within the context."""
    schemas = draw_schemas(200)
    assert len({json.dumps(schema) for schema in schemas}) > 150
    with LLM(**PINNED) as whole:
        assert_all_valid(whole, schemas)


def test_each_kind_of_grammar_is_followed(llm):
    wishes = {
        "json": {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 2, "maxItems": 2},
        "json_object": True,
        "regex": "[a-c]{3,5}x",
        "choice": ["yes", "no", 'perhaps "so"\n'],
        "grammar": 'start: "a" start "b" | "c"',
    }
    params = [constrained(replace(GREEDY, max_tokens=100), **{k: v}) for k, v in wishes.items()]
    schema, anything, regex, choice, lark = llm.generate(["x"] * len(params), params)
    assert jsonschema_rs.is_valid(wishes["json"], json.loads(schema.text))
    assert anything.text.startswith("{")
    assert re.fullmatch("[a-c]{3,5}x", regex.text)
    assert choice.text in wishes["choice"]
    assert re.fullmatch("a*cb*", lark.text)
    for output in (schema, regex, choice, lark):
        assert output.finish_reason == "stop"
        assert output.stop_reason is None
        assert 0 not in output.token_ids, "a text that can only end needs no end id"


def test_a_form_begins_behind_the_reasoning(llm):
    [line] = llm.tokenizer.encode("\n", add_special=False)
    tokens = ReasoningTokens(ends=[line])
    params = SamplingParams(temperature=0.8, max_tokens=200, min_tokens=3)
    prompts = [f"x{number} = " for number in range(4)]
    after = [
        constrained(replace(params, seed=seed), json=SCHEMA, reasoning=tokens) for seed in range(4)
    ]
    thoughts = set()
    for output in llm.generate(prompts, after):
        assert output.finish_reason == "stop"
        cut = output.token_ids.index(line) + 1
        thoughts.add(llm.tokenizer.decode(output.token_ids[:cut]))
        form = llm.tokenizer.decode(output.token_ids[cut:])
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(form)), output.text
    assert len(thoughts) > 2


def test_reasoning_has_the_tokens_of_a_request_without_a_form(llm):
    params = replace(GREEDY, logit_bias={0: -100.0})
    [free] = llm.generate("def add(", params)
    end = free.token_ids[5]
    cut = free.token_ids.index(end) + 1
    assert cut > 2
    tokens = ReasoningTokens(ends=[end])
    [output] = llm.generate("def add(", constrained(params, choice=["yes"], reasoning=tokens))
    assert output.token_ids[:cut] == free.token_ids[:cut]
    assert llm.tokenizer.decode(output.token_ids[cut:]) == "yes"


def test_other_requests_keep_their_tokens_beside_a_row_with_a_grammar(llm):
    prompts = ["def add(", "import os", "class Node:"]
    params = [GREEDY, replace(GREEDY, temperature=0.8, seed=5, top_k=40), GREEDY]
    alone = [output.token_ids for output in llm.generate(prompts, params)]
    beside = llm.generate([*prompts, "x"], [*params, constrained(json=SCHEMA)])
    assert [output.token_ids for output in beside[:3]] == alone
    assert beside[3].text.startswith("{")


def test_rows_without_a_grammar_take_no_more_steps_beside_one(llm):
    before = llm.stats().steps
    llm.generate(["def add("], GREEDY)
    alone = llm.stats().steps - before
    llm.generate(["def add(", "x"], [GREEDY, constrained(regex="a{4}")])
    assert llm.stats().steps - before - alone == alone


def test_no_bit_depends_on_whether_steps_overlap(llm, monkeypatch):
    prompts = ["def ", "x = ", "class ", "# ", "import ", "y = "]
    drawn = SamplingParams(temperature=0.9, max_tokens=30, seed=3, logprobs=2, top_k=40)
    wishes = [
        constrained(replace(GREEDY, max_tokens=40), json=SCHEMA),
        drawn,
        constrained(drawn, json=SCHEMA),
        constrained(replace(drawn, presence_penalty=0.5, min_tokens=5), regex="[a-d]{3,12}z"),
        constrained(replace(GREEDY, logit_bias={7: 1.0}, max_tokens=30), json_object=True),
        GREEDY,
    ]

    def told():
        outputs = llm.generate(prompts, wishes)
        return [(one.token_ids, one.finish_reason, one.text, one.logprobs) for one in outputs]

    overlapping = told()
    serial = replace(llm.engine.config, overlap=False)
    monkeypatch.setattr(llm.engine, "config", serial)
    assert told() == overlapping


def test_forced_tokens_are_those_of_one_by_one(llm, monkeypatch):
    wishes = [
        constrained(replace(GREEDY, max_tokens=40), json=schema)
        for schema in [SCHEMA, *draw_schemas(5)]
    ] + [constrained(GREEDY, choice=["one two three four five six"])]
    at_once = llm.generate(["def "] * len(wishes), wishes)
    monkeypatch.setattr(TokenConstraint, "forced", lambda self, generated: [])
    one_by_one = llm.generate(["def "] * len(wishes), wishes)
    assert [one.token_ids for one in at_once] == [one.token_ids for one in one_by_one]
    assert [one.finish_reason for one in at_once] == [one.finish_reason for one in one_by_one]


def test_a_longer_forced_text_takes_no_more_steps(llm):
    def steps(text):
        before = llm.stats().steps
        [output] = llm.generate("x", constrained(regex=f"{text}[a-b]"))
        assert output.text[:-1] == text
        return llm.stats().steps - before, len(output.token_ids)

    (few, short), (same, long) = steps("one "), steps("one two three ")
    assert short + 3 < long
    assert few == same


@pytest.mark.parametrize("most", [1, 2, 5])
def test_forced_tokens_count_against_max_tokens(llm, most):
    [output] = llm.generate(
        "x", constrained(replace(GREEDY, max_tokens=most), choice=["abcdefghijkl mnop"])
    )
    assert (len(output.token_ids), output.finish_reason) == (most, "length")


def test_a_stop_string_ends_the_text_inside_forced_tokens(llm):
    params = constrained(replace(GREEDY, stop=("five",)), choice=["one two three four five six"])
    [output] = llm.generate("x", params)
    assert (output.finish_reason, output.stop_reason) == ("stop", "five")
    assert output.text == "one two three four "


def test_a_stream_has_a_piece_for_each_token_and_one_end(llm):
    params = constrained(json=SCHEMA)
    [whole] = llm.generate("x", params)
    pieces = list(llm.stream("x", params))
    assert [piece.token_id for piece in pieces] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason


def test_closing_a_stream_early_aborts_its_request(llm):
    with contextlib.closing(llm.stream("x", constrained(json=SCHEMA))) as pieces:
        next(pieces)
    [after] = llm.generate("x", constrained(choice=["done"]))
    assert after.text == "done"


def test_samples_of_one_prompt_follow_the_grammar_each_in_its_own_way(llm):
    params = constrained(
        SamplingParams(temperature=1.5, max_tokens=20, n=4, seed=1), regex="[a-z]{6}[0-9]"
    )
    [output] = llm.generate("x", params)
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[a-z]{6}[0-9]", text) for text in texts)
    assert len(set(texts)) > 1


def test_log_probabilities_are_those_of_the_raw_logits(llm):
    params = constrained(replace(GREEDY, logprobs=2), regex="zq{3}j")
    [output] = llm.generate("def add(", params)
    assert output.text == "zqqqj"
    prompt = llm.tokenizer.encode("def add(")
    [scores] = llm.score([[*prompt, *output.token_ids]])
    given = [table[token] for table, token in zip(output.logprobs, output.token_ids, strict=True)]
    np.testing.assert_allclose(given, scores[len(prompt) - 1 :], atol=2e-3)
    assert given[0] < -3, "the model would rather have begun with another letter"


def test_a_preempted_request_continues_its_text(llm):
    params = constrained(json=SCHEMA)
    [whole] = llm.generate("x", params)
    pieces = []
    for piece in llm.stream("x", params):
        pieces.append(piece)
        if len(pieces) in (1, 5):
            llm.engine.scheduler.requeue_all()
    assert [piece.token_id for piece in pieces] == whole.token_ids
    assert pieces[-1].usage.preemptions > 0


def test_a_request_without_any_token_left_fails_alone(llm):
    [end] = llm.tokenizer.encode("y", add_special=False)
    params = constrained(replace(GREEDY, logit_bias={end: -np.inf}), regex="[a-c]{2}y")
    failed, free, other = llm.generate(
        ["x", "def ", "x"], [params, GREEDY, constrained(choice=["yes"])]
    )
    assert failed.finish_reason == "error"
    assert re.search("leave no token after [12] tokens", failed.error)
    assert re.fullmatch("[a-c]{2}", failed.text)
    assert other.text == "yes"
    assert free.token_ids == llm.generate("def ", GREEDY)[0].token_ids


def test_a_text_that_can_have_no_token_is_empty_and_costs_no_neighbour_a_step(llm, caplog):
    """Its stop id is the last one of its prompt, which did not end it."""
    [x] = llm.tokenizer.encode("x", add_special=False)
    params = replace(
        GREEDY, ignore_eos=True, stop_token_ids=[x], logit_bias={x: -math.inf}, temperature=0.7
    )
    prompt = "def ab"
    [wanted] = llm.generate([prompt], GREEDY)
    empty, beside = llm.generate([[5, 6, x], prompt], [constrained(params, regex="x?"), GREEDY])
    assert (empty.token_ids, empty.text, empty.finish_reason) == ([], "", "stop")
    assert empty.stop_reason is None
    assert beside.token_ids == wanted.token_ids
    assert "computed again" not in caplog.text


def test_a_grammar_that_is_not_valid_is_refused_before_anything_runs(llm):
    before = llm.stats().steps
    with pytest.raises(
        ValueError, match=r"prompt 1: the grammar of structured_outputs cannot be used: .*unclosed"
    ):
        llm.generate(["a", "b"], [GREEDY, constrained(regex="((")])
    assert llm.stats().steps == before


def test_min_tokens_and_ignore_eos_keep_the_end_id_out(llm):
    for params in (
        constrained(replace(GREEDY, min_tokens=10, logit_bias={0: 100.0}), regex="[a-z]*"),
        constrained(
            replace(GREEDY, ignore_eos=True, max_tokens=10, logit_bias={0: 100.0}), regex="[a-z]*"
        ),
    ):
        [output] = llm.generate("x", params)
        assert len(output.token_ids) >= 10
    [soon] = llm.generate("x", constrained(replace(GREEDY, logit_bias={0: 100.0}), regex="[a-z]*"))
    assert (soon.token_ids, soon.finish_reason, soon.text) == ([0], "stop", "")


def test_a_text_shorter_than_min_tokens_ends_with_its_grammar(llm):
    [output] = llm.generate("x", constrained(replace(GREEDY, min_tokens=9), choice=["no"]))
    assert (output.text, output.finish_reason) == ("no", "stop")


@pytest.mark.slow
def test_strict_mode_serves_what_was_warmed_up():
    params = constrained(replace(GREEDY, max_tokens=16), json=SCHEMA)
    options = {"cache": CacheConfig(max_sequences=1, page_size=16), "progress": False}
    engine = EngineConfig(token_budget=32)
    with LLM(dtype="float32", max_model_len=64, strict=True, engine=engine, **options) as strict:
        strict.warm_up(batch=1, prompt_tokens=4, sampling=GREEDY)
        with pytest.raises(ProgramRefused, match="grammar"):
            strict.generate("x", params)
        strict.warm_up(batch=1, prompt_tokens=4, sampling=params)
        [output] = strict.generate("x", params)
        assert output.text.startswith("{")
        assert strict.generate("x", GREEDY)[0].finish_reason == "length"
        assert strict.stats().compiled_late == 0


def test_a_compiled_grammar_is_kept_and_the_number_is_bounded(llm, monkeypatch):
    tried = []
    check = trial.GrammarTrial.check
    monkeypatch.setattr(
        trial.GrammarTrial, "check", lambda *one: (tried.append(one), check(*one))[1]
    )
    monkeypatch.setattr(grammars, "MOST_KEPT", 2)
    llm.grammars.close()
    one = StructuredOutputs(regex="kept+")
    assert llm.grammars.compile(one) is llm.grammars.compile(one)
    assert len(tried) == 1
    for text in ("other", "another"):
        llm.grammars.compile(StructuredOutputs(regex=text))
    assert list(llm.grammars._kept) == [StructuredOutputs(regex=t) for t in ("other", "another")]
    bad = StructuredOutputs(regex="[[")
    for _ in range(2):
        with pytest.raises(ValueError, match="unclosed"):
            llm.grammars.compile(bad)
    assert len(tried) == 4


def test_without_llguidance_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    lacking = grammars.Grammars(None, (0,), 100)
    with pytest.raises(ValueError, match=r'pip install "jaxkv\[serve\]"'):
        lacking.compile(StructuredOutputs(regex="a"))


def test_a_model_without_a_tokenizer_refuses_grammars():
    with pytest.raises(ValueError, match="need a tokenizer"):
        grammars.Grammars(None, (0,), 100).compile(StructuredOutputs(regex="a"))


def test_the_jitted_generate_refuses_grammars(llm):
    with pytest.raises(ValueError, match=r"use LLM\.generate"):
        jaxkv.generate(
            llm.engine.runner.params,
            llm.model,
            jnp.asarray([[1, 2]]),
            sampling=constrained(regex="a"),
        )
