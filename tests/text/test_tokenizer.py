"""tokenizer.json and the files around it: ids, text, special ids, and what hostile ones come to."""

import functools
import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxkv.errors import BadCheckpoint
from jaxkv.text.tokenizer import load_tokenizer


@functools.cache
def trained():
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["a small text about a small model"], trainer)
    return library.to_str()


def make_library(*, bos=False):
    library = Tokenizer.from_str(trained())
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return library


@pytest.fixture
def directory(tmp_path):
    make_library().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory, name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text, encoding="utf-8")


def load(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def test_a_directory_without_a_tokenizer_gives_none(tmp_path):
    write(tmp_path, "config.json", {"eos_token_id": 1})
    assert load_tokenizer(tmp_path) is None


def test_text_survives_the_round_trip(directory):
    tokenizer = load(directory)
    for text in ("", "a small model", "Zürich 😀\n\t", "\0", "<|weird|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_no_text(directory):
    tokenizer = load(directory)
    assert tokenizer.encode("a</s>") == [*tokenizer.encode("a"), 1]
    assert tokenizer.decode(tokenizer.encode("<s>a</s>")) == "a"
    assert tokenizer.is_silent(1)
    assert not tokenizer.is_silent(tokenizer.encode("a")[0])


@pytest.mark.parametrize("bos", [False, True])
def test_the_post_processor_alone_decides_on_a_bos(tmp_path, bos):
    make_library(bos=bos).save(str(tmp_path / "tokenizer.json"))
    # Both flags are for Transformers' converters; tokenizer.json already is what they led to.
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": not bos})
    tokenizer = load(tmp_path)
    assert (tokenizer.encode("a")[0] == 0) is bos
    assert tokenizer.encode("a", add_special=False)[0] != 0


def test_a_post_processor_that_adds_an_undefined_token_is_refused_when_loading(tmp_path):
    # The library notices only while encoding, and panics.
    make_library(bos=True).save(str(tmp_path / "tokenizer.json"))
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["post_processor"]["special_tokens"] = {}
    write(tmp_path, "tokenizer.json", tree)
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is malformed"):
        load_tokenizer(tmp_path)


def test_a_post_processor_that_adds_an_unknown_id_is_refused(tmp_path):
    make_library(bos=True).save(str(tmp_path / "tokenizer.json"))
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["post_processor"]["special_tokens"]["<s>"]["ids"] = [2**31]
    write(tmp_path, "tokenizer.json", tree)
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json adds the unknown id 2147483648"):
        load_tokenizer(tmp_path)


def test_a_text_that_the_library_cannot_encode_is_a_value_error(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match="the tokenizer cannot encode the text: WordLevel error"):
        tokenizer.encode("b")


def test_truncation_and_padding_left_over_from_training_are_switched_off(tmp_path):
    library = make_library()
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.decode(tokenizer.encode("a small model, a small text")).endswith("small text")


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, ()),
        ({"tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<s>"}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eot|>"}}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "<never heard of>"}}, ()),
        (
            {
                "config.json": {"eos_token_id": 5, "bos_token_id": 4},
                "tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<s>"},
            },
            (5,),
        ),
        (
            {
                "generation_config.json": {"eos_token_id": [2, 1]},
                "config.json": {"eos_token_id": 5, "bos_token_id": 4},
            },
            (2, 1),
        ),
        (
            {
                "generation_config.json": {"eos_token_id": None},
                "config.json": {"eos_token_id": 0},
            },
            (0,),
        ),
    ],
)
def test_end_ids_come_from_the_first_file_that_names_any(directory, files, eos):
    for name, value in files.items():
        write(directory, name, value)
    assert load(directory).eos_ids == eos


@pytest.mark.parametrize("bad", [-1, 278, 2**31, 2**40, 2**70])
def test_ids_out_of_range_are_refused(directory, bad):
    tokenizer = load(directory)
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the model's \[0, 278\)"):
        tokenizer.decode([5, bad])


def test_ids_that_only_the_logits_have_stand_for_no_text(directory):
    write(directory, "config.json", {"vocab_size": 300})
    tokenizer = load(directory)
    a = tokenizer.encode("a")
    assert tokenizer.decode([299, *a, 280]) == "a"
    with pytest.raises(ValueError, match=r"\[0, 300\)"):
        tokenizer.decode([300])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d \ude00"])
def test_lone_surrogates_are_refused(directory, text):
    with pytest.raises(ValueError, match="lone surrogate 0xd"):
        load(directory).encode(text)


HOSTILE = {
    "empty": ("tokenizer.json", "", "is not JSON: Expecting value"),
    "no json": ("tokenizer.json", "\n\n{nope", "is not JSON: Expecting property name"),
    "a list": ("tokenizer.json", "[]", "holds a JSON list, wanted an object"),
    "no model": ("tokenizer.json", "{}", "is malformed: Model missing"),
    "unknown model": ("tokenizer.json", '{"model": {"type": "Pickle"}}', "is malformed"),
    "deep": ("tokenizer.json", '{"a":' * 10**5, "nested too deeply"),
    "merge of nothing": (
        "tokenizer.json",
        '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["q w"]}}',
        "is malformed: Token `q` out of vocabulary",
    ),
    "negative id": (
        "tokenizer.json",
        '{"version":"1.0","model":{"type":"BPE","vocab":{"a":-1},"merges":[]}}',
        "is malformed",
    ),
    "config no json": ("tokenizer_config.json", "{", "is not JSON"),
    "config a list": ("tokenizer_config.json", "[]", "holds a JSON list, wanted an object"),
    "config deep": ("tokenizer_config.json", '{"a":' * 10**5, "nested too deeply"),
    "config key twice": ("tokenizer_config.json", '{"a": 1, "a": 2}', "holds the key 'a' twice"),
    "config long int": ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}", "is not JSON"),
    "eos a list": ("tokenizer_config.json", '{"eos_token": ["</s>"]}', "eos_token is neither"),
    "eos an empty object": ("tokenizer_config.json", '{"eos_token": {"content": 5}}', "neither"),
    "template a number": ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is"),
    "template unnamed": (
        "tokenizer_config.json",
        '{"chat_template": [{"template": "x"}]}',
        "chat_template is neither",
    ),
    "template named twice": (
        "tokenizer_config.json",
        '{"chat_template": [{"name": "a", "template": "x"}, {"name": "a", "template": "y"}]}',
        "chat_template is neither",
    ),
    "template long": (
        "tokenizer_config.json",
        json.dumps({"chat_template": "x" * (2**20 + 1)}),
        "too long",
    ),
    "jinja long": ("chat_template.jinja", "x" * (2**20 + 1), "the limit is 1048576"),
    "eos a text": (
        "generation_config.json",
        '{"eos_token_id": "2"}',
        "eos_token_id is no token id",
    ),
    "eos a bool": (
        "generation_config.json",
        '{"eos_token_id": true}',
        "eos_token_id is no token id",
    ),
    "eos negative": ("config.json", '{"eos_token_id": -1}', "eos_token_id is no token id: -1"),
    "eos huge": ("config.json", '{"eos_token_id": [1, 1e400]}', "eos_token_id is no token id"),
    "bos an object": ("config.json", '{"bos_token_id": {}}', "bos_token_id is no token id"),
    "generation no json": ("generation_config.json", "null", "holds a JSON NoneType"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line_naming_file_and_reason(directory, case):
    name, text, reason = HOSTILE[case]
    write(directory, name, text)
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        load_tokenizer(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory / name) in message
    assert len(message) < 400 + len(str(directory))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"]
)
def test_links_out_of_the_directory_are_not_followed(directory, name):
    outside = directory.parent / "outside"
    outside.write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside)
    with pytest.raises(BadCheckpoint, match="link out of the model directory"):
        load_tokenizer(directory)


def test_bytes_that_are_no_utf8_are_named(directory):
    (directory / "tokenizer_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json is not UTF-8 \(byte 7\)"):
        load_tokenizer(directory)


def test_neither_the_tokenizer_nor_the_detokenizer_imports_jax():
    names = "jaxkv.text.tokenizer, jaxkv.text.detokenize, jaxkv.weights.safetensors, jaxkv.weights.rules"
    code = f"import sys, {names}; sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.torch
def test_ids_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    make_library(bos=True).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), load(tmp_path)
    for text in ("a small model", "Zürich 😀 </s> x", "", " two  spaces "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
