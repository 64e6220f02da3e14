"""Grammars alone, without a model: the state of a text, kinds of tokenizers, and hostile grammars."""

import json
import os
import string
import threading

import numpy as np
import pytest
import tokenizers

from jaxkv import StructuredOutputs, default_model
from jaxkv.structured import trial
from jaxkv.structured.grammar import TokenConstraint
from jaxkv.structured.grammars import Grammars
from jaxkv.text.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(default_model.path())
VOCAB, END = 4096, 0


@pytest.fixture(scope="module")
def compiled():
    """Compiles grammars for the vocabulary of the model in the package."""
    grammars = Grammars(TOKENIZER, (END,), VOCAB)
    yield lambda **outputs: grammars.compile(StructuredOutputs(**outputs))
    grammars.close()


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def settled(constraint, generated):
    """Computes and takes the mask after some tokens; returns whether the text ends."""
    assert not constraint.ends(generated)
    masks = np.zeros((1, constraint.grammar.forbidden.size), np.uint32)
    constraint.grammar.fill([constraint.matcher], masks)
    return constraint.settle(masks[0], generated)


def ids(text):
    return TOKENIZER.encode(text, add_special=False)


def test_the_end_id_is_allowed_only_where_the_text_is_complete(compiled):
    constraint = TokenConstraint(compiled(regex="ab?"))
    assert END not in tokens_of(constraint.mask)
    assert not settled(constraint, ids("a"))
    assert set(tokens_of(constraint.mask)) == {END, *ids("b")}
    assert constraint.ends([*ids("a"), *ids("b")])


def test_every_token_that_the_mask_allows_is_right_and_every_other_is_wrong(compiled):
    constraint = TokenConstraint(compiled(regex="(do|def|done)[0-9]"))
    allowed = {TOKENIZER.decode([token]) for token in tokens_of(constraint.mask)}
    assert {"d", "do", "de"} <= allowed
    assert all(
        any(whole.startswith(piece[:3]) for whole in ("do", "def", "done")) for piece in allowed
    )


def test_the_state_is_a_function_of_the_tokens_after_an_interruption(compiled, monkeypatch):
    grammar = compiled(regex="[a-c]{1,9}z")
    constraint, text = TokenConstraint(grammar), [*ids("a"), *ids("b"), *ids("c")]
    constraint.ends(text[:1])

    class Interrupted:
        def __init__(self, matcher):
            self.matcher = matcher

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def consume_tokens(self, tokens):
            self.matcher.consume_tokens(tokens)
            raise KeyboardInterrupt

    real = constraint.matcher
    constraint.matcher = Interrupted(real)
    with pytest.raises(KeyboardInterrupt):
        constraint.ends(text)
    constraint.matcher = real
    assert not settled(constraint, text)
    fresh = TokenConstraint(grammar)
    assert not settled(fresh, text)
    assert np.array_equal(constraint.mask, fresh.mask)


def test_tokens_that_a_request_may_not_sample_are_not_in_its_masks(compiled):
    grammar = compiled(regex="[ab]*")
    a, b = *ids("a"), *ids("b")
    constraint = TokenConstraint(grammar, never=[a, 10**6], before_least=[END], least=2)
    assert a not in tokens_of(constraint.mask)
    assert b in tokens_of(constraint.mask)
    assert END not in tokens_of(constraint.mask)
    assert not settled(constraint, [b])
    assert END not in tokens_of(constraint.mask)
    assert not settled(constraint, [b, b])
    assert END in tokens_of(constraint.mask)


def test_a_text_ends_if_it_is_complete_and_no_token_is_left(compiled):
    grammar = compiled(regex="ab?")
    constraint = TokenConstraint(grammar, never=[END, *ids("b")])
    assert settled(constraint, ids("a"))


def test_a_text_that_is_not_complete_and_has_no_token_left_is_an_error(compiled):
    constraint = TokenConstraint(compiled(regex="ab"), never=ids("b"))
    with pytest.raises(ValueError, match="leave no token after 1 tokens; allow more tokens"):
        settled(constraint, ids("a"))


def test_forced_tokens_are_those_that_each_mask_allows_alone(compiled):
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"enum": ["some text", "some more"]}},
        "required": ["a_long_name"],
        "additionalProperties": False,
    }
    for grammar in (compiled(json=schema), compiled(choice=["one two three", "one two four"])):
        constraint, generated = TokenConstraint(grammar), []
        longest = 0
        while not constraint.ends(generated):
            forced = constraint.forced(generated)
            longest = max(longest, len(forced))
            for token in forced:
                assert not settled(constraint, generated)
                assert tokens_of(constraint.mask) == [token]
                generated.append(token)
            if forced:
                continue
            assert not settled(constraint, generated)
            generated.append(tokens_of(constraint.mask)[0])
        assert longest > 1


def test_a_forced_token_that_the_request_may_not_sample_ends_the_forced_ones(compiled):
    grammar = compiled(regex="one two three")
    everything = TokenConstraint(grammar).forced([])
    assert len(everything) > 2
    assert TokenConstraint(grammar, never=everything[2:3]).forced([]) == everything[:2]
    early = TokenConstraint(grammar, before_least=everything[1:2], least=2)
    assert early.forced([]) == everything[:1]
    assert TokenConstraint(grammar, forces=False).forced([]) == []


def test_what_is_left_of_forced_tokens_is_not_tokenised_again(compiled):
    grammar = compiled(regex="one two three[ab]four five six")
    constraint, calls = TokenConstraint(grammar), []

    class Counting:
        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self._matcher, name)

    constraint.matcher = Counting(constraint.matcher)
    text = [*TOKENIZER.encode("one two three"), *ids("a"), *TOKENIZER.encode("four five six")]
    for count in range(len(text)):
        wanted = TokenConstraint(grammar).forced(text[:count])
        assert constraint.forced(text[:count]) == wanted
    assert calls.count("compute_ff_tokens") < 6 < len(text)


def test_thousands_of_choices_fit(compiled):
    choices = [f"{number:040d} (\u00e9.*)\n" for number in range(4096)]
    constraint, generated = TokenConstraint(compiled(choice=choices)), []
    while not constraint.ends(generated):
        assert not settled(constraint, generated)
        generated.append(tokens_of(constraint.mask)[-1])
    assert TOKENIZER.decode(generated) in choices


def test_forced_tokens_at_once_are_bounded(compiled):
    assert 0 < len(TokenConstraint(compiled(regex="xyz" * 300)).forced([])) <= 64


def test_the_masks_of_many_texts_are_computed_in_one_call(compiled):
    grammars = [compiled(regex=f"[a-{last}]+") for last in "bcdefgh"]
    matchers = [grammar.new_matcher() for grammar in grammars]
    masks = np.zeros((len(grammars), grammars[0].forbidden.size), np.uint32)
    grammars[0].fill(matchers, masks)
    assert all(np.array_equal(g.first_mask, mask) for g, mask in zip(grammars, masks, strict=True))


def test_a_limit_exceeded_in_a_text_is_an_error_of_its_request(compiled):
    constraint = TokenConstraint(compiled(regex="ab"))
    with pytest.raises(
        RuntimeError, match=r"grammar of structured_outputs failed: .*doesn't satisfy"
    ):
        constraint.ends(ids("q"))


def test_the_name_of_a_special_token_in_a_text_is_never_the_special_token(compiled):
    [name] = [TOKENIZER.decode([END], skip_special_tokens=False)]
    constraint = TokenConstraint(compiled(choice=[f"x{name}y"]))
    generated = []
    while not constraint.ends(generated):
        if settled(constraint, generated):
            break
        generated.append(tokens_of(constraint.mask)[0])
    assert END not in generated
    assert TOKENIZER.decode(generated) == f"x{name}y"


def byte_fallback():
    """Returns a tokenizer with a few letters, a word and all bytes, like Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *string.ascii_lowercase, "lo"]:
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("l", "o")], unk_token="<unk>", byte_fallback=True)
    )
    library.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


@pytest.mark.parametrize("ends", [(2,), (2, 301), ()], ids=["one end", "two ends", "no end"])
def test_a_tokenizer_with_byte_fallback_writes_any_text_with_and_without_end_ids(ends):
    library = byte_fallback()
    tokenizer = Tokenizer(library, eos_ids=ends, model_vocab_size=320)
    grammars = Grammars(tokenizer, ends, 320)
    try:
        constraint = TokenConstraint(grammars.compile(StructuredOutputs(regex="lo é(!|€)?")))
    finally:
        grammars.close()
    generated = []
    while not constraint.ends(generated):
        if settled(constraint, generated):
            break
        allowed = tokens_of(constraint.mask)
        assert max(allowed) < 320
        if set(allowed) & set(ends):
            break
        generated.append(allowed[-1])
    # Without an end id the text goes on as long as it can.
    assert library.decode(generated) == ("lo é" if ends else "lo é€")
    assert set(generated) > {3 + 0xC3, 3 + 0xA9}, "é has two bytes"


def test_a_tokenizer_larger_than_the_models_logits_stays_below_them():
    tokenizer = Tokenizer(TOKENIZER._library, eos_ids=(END,), model_vocab_size=4000)
    grammars = Grammars(tokenizer, (END,), 4000)
    try:
        constraint = TokenConstraint(grammars.compile(StructuredOutputs(regex="(.|\n)*")))
    finally:
        grammars.close()
    assert constraint.mask.size == 125
    assert 3900 < max(tokens_of(constraint.mask)) < 4000


# Hostile grammars.


def many_properties(count):
    names = {f"p{number}": {"type": "integer"} for number in range(count)}
    return json.dumps({"type": "object", "properties": names})


HOSTILE = {
    "a huge repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "an exponential pattern": {"regex": "(a|a)*" * 30 + "b"},
    "a long look-behind": {"regex": ".*a.{28}b"},
    "optional letters": {"regex": "(a?){2000}a{2000}"},
    "a schema that refers to itself": {"json": {"$ref": "#"}},
    "schemas that refer to each other": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "a doubling tree": {
        "json": {
            "$defs": {
                f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
                for n in range(40)
            }
            | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "products of allOf": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(9)]}
                for i in range(9)
            ]
        }
    },
    "a remote reference": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "long strings": {"json": {"type": "string", "minLength": 10**6}},
    "a large multiple": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "an endless rule": {"grammar": "start: start"},
    "an ambiguous rule": {"grammar": 'start: start start | "a" | '},
    "ambiguous alternatives": {
        "grammar": "start: " + " | ".join(f'"{number:040d}"' for number in range(4096))
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_compiled_or_refused_within_the_limits(compiled, name):
    refusal = ""
    try:
        constraint, generated = TokenConstraint(compiled(**HOSTILE[name])), []
        while len(generated) < 8 and not constraint.ends(generated):
            if settled(constraint, generated):
                break
            generated.append(tokens_of(constraint.mask)[-1])
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("the grammar of structured_outputs")
    assert len(refusal) < 700


def test_a_grammar_is_taken_if_only_some_tokens_exceed_a_limit(compiled):
    """Texts of "b" are possible."""
    constraint = TokenConstraint(compiled(regex="a{1000000}|b"))
    assert constraint.ends(ids("b"))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"not": {"type": "null"}}}, "not"),
        ({"json": {"$ref": "http://127.0.0.1:1/schema.json"}}, "not present in a registry"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"grammar": "begin: /a/"}, "start"),
        # It has a first mask, and no token can follow.
        ({"regex": "a{1000000}"}, "too many expressions"),
    ],
    ids=repr,
)
def test_a_refusal_gives_the_reason(compiled, outputs, message):
    with pytest.raises(ValueError, match=message):
        compiled(**outputs)


def test_a_grammar_that_takes_too_long_is_stopped_and_the_next_one_is_compiled(monkeypatch):
    monkeypatch.setattr(trial, "MAX_SECONDS", 0.05)
    grammars = Grammars(TOKENIZER, (END,), VOCAB)
    try:
        with pytest.raises(ValueError, match=r"too complex: compiling it took more than 0.05 s"):
            grammars.compile(StructuredOutputs(json=many_properties(3000)))
        monkeypatch.setattr(trial, "MAX_SECONDS", 60)
        assert grammars.compile(StructuredOutputs(regex="a")).first_mask.any()
    finally:
        grammars.close()


def test_a_grammar_that_takes_too_much_memory_ends_its_process_alone(monkeypatch):
    monkeypatch.setattr(trial, "MAX_MEMORY_BYTES", 48 * 2**20)
    monkeypatch.setattr(trial, "MAX_SECONDS", 60)
    grammars = Grammars(TOKENIZER, (END,), VOCAB)
    try:
        with pytest.raises(ValueError, match="took more than 48 MiB of memory"):
            grammars.compile(StructuredOutputs(json=many_properties(3000)))
        assert grammars.compile(StructuredOutputs(regex="a")).first_mask.any()
    finally:
        grammars.close()


def test_the_worker_is_given_no_secret_and_ends_with_the_grammars(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    grammars = Grammars(TOKENIZER, (END,), VOCAB)
    grammars.compile(StructuredOutputs(regex="a"))
    pid = grammars._trial._worker._process.pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    grammars.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_may_compile_at_once():
    grammars, results = Grammars(TOKENIZER, (END,), VOCAB), []

    def compile_one(number):
        results.append(grammars.compile(StructuredOutputs(regex=f"a{{{1 + number % 3}}}")))

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grammars.close()
    assert len(results) == 8


def test_a_tokenizer_that_llguidance_cannot_read_is_named(monkeypatch):
    class Strange(Tokenizer):
        def to_json(self):
            return '{"version": "1.0", "model": {"type": "Unknown"}}'

    grammars = Grammars(Strange(TOKENIZER._library), (END,), VOCAB)
    with pytest.raises(ValueError, match="llguidance cannot read the model's tokenizer"):
        grammars.compile(StructuredOutputs(regex="a"))
