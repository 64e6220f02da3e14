"""Tokens that the files beside tokenizer.json name. Truth is Transformers."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.text.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = len(ALPHABET)


def token(content, **flags):
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content} | usual | flags


def write(folder, **files):
    """Writes a byte-level tokenizer with the added token `<s>`, and JSON files beside it."""
    library = Tokenizer(
        models.BPE({piece: at for at, piece in enumerate([*ALPHABET, "<named>"])}, [])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


FIRST = SIZE + 2
CASES = {
    "listed beyond the vocabulary": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(FIRST): token("<a>", special=True),
                str(FIRST + 1): token("<b>", rstrip=True),
                str(FIRST + 2): token("<c>", lstrip=True, normalized=True),
            }
        }
    },
    "other flags than tokenizer.json": {
        "tokenizer_config": {
            "added_tokens_decoder": {str(SIZE + 1): token("<s>", lstrip=True, rstrip=True)}
        }
    },
    "named, but listed as not special": {
        "tokenizer_config": {
            "eos_token": "<a>",
            "added_tokens_decoder": {str(FIRST): token("<a>", special=False, lstrip=True)},
        }
    },
    "named, in the vocabulary, not added": {
        "tokenizer_config": {
            "eos_token": "<named>",
            "bos_token": None,
            "unk_token": {"__type": "AddedToken", "content": "<s>"},
        }
    },
    "additional special tokens": {
        "tokenizer_config": {
            "additional_special_tokens": ["<named>", {"__type": "AddedToken", **token("<s>")}]
        }
    },
    "extra special tokens by name": {
        "tokenizer_config": {"extra_special_tokens": {"image_token": "<named>"}}
    },
    "named without an id": {
        "tokenizer_config": {"pad_token": "<pad>"},
        "config": {"vocab_size": SIZE + 8},
    },
    "older files": {
        "tokenizer_config": {"eos_token": "<other>"},
        "special_tokens_map": {
            "eos_token": {"content": "<a>"},
            "additional_special_tokens": ["<named>"],
        },
        "added_tokens": {"<a>": FIRST, "<b>": FIRST + 1},
        "config": {"vocab_size": SIZE + 8},
    },
    "split special tokens": {"tokenizer_config": {"split_special_tokens": True}},
    "settings that change nothing": {
        "tokenizer_config": {
            "model_max_length": 10**30,
            "clean_up_tokenization_spaces": True,
            "add_bos_token": True,
            "bos_token": "<s>",
        }
    },
}
TEXTS = [
    "plain",
    "<s>x <s> y",
    " <a> x <b>  y <c>  z <pad>",
    "a<named>b",
    "<a><b><c><named><s>",
    "é😀 <other>",
]


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_are_those_of_transformers(tmp_path, case):
    from transformers import PreTrainedTokenizerFast

    write(tmp_path, **CASES[case])
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        if case == "older files" and "<other>" in text:
            continue
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_a_token_without_a_place_is_left_out_with_a_warning(tmp_path, caplog):
    listed = {str(FIRST + 3): token("<far>"), "5": token("<taken>"), str(FIRST): token("<a>")}
    write(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<a>") == [FIRST]
    assert tokenizer.num_ids == FIRST + 1
    assert len(tokenizer.encode("<far>")) == 5
    [record] = caplog.records
    assert "<taken> (5), <far> (261)" in record.getMessage()


def test_a_named_token_beyond_the_logits_is_not_added(tmp_path):
    write(tmp_path, tokenizer_config={"pad_token": "<pad>"}, config={"vocab_size": FIRST})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.num_ids == FIRST
    assert len(tokenizer.encode("<pad>")) == 5


def test_a_multimodal_models_vocabulary_is_that_of_its_text_part(tmp_path):
    write(tmp_path, config={"text_config": {"vocab_size": 999}})
    assert load_tokenizer(tmp_path).num_ids == 999


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "is no JSON object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": "x"}}}, "is no object with a content"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": token("a")}}}, "'x' in the place of"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"9" * 5000: token("a")}}},
            "in the place of a token id",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"1": token("a", lstrip="no")}}},
            "lstrip of added_tokens_decoder.* is 'no', wanted true or false",
        ),
        ({"tokenizer_config": {"extra_special_tokens": 5}}, "extra_special_tokens is neither"),
        ({"added_tokens": {"<a>": -1}}, "-1 in the place of a token id"),
        ({"special_tokens_map": {"eos_token": 5}}, "eos_token is neither text nor"),
    ],
)
def test_a_malformed_list_is_one_line(tmp_path, files, reason):
    write(tmp_path, **files)
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
