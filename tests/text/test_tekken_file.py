"""Mistral's tekken.json gets the ids of byte-pair encoding by rank, written out here."""

import base64
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import BadCheckpoint
from jaxkv.text.tokenizer import load_tokenizer

PATTERN = r"\s?[^\s]+|\s"
# "wxyz" is a token to which no merges lead.
TOKENS = [bytes([byte]) for byte in range(256)] + [
    b"ab",
    b" a",
    b"abc",
    b"bc",
    "é".encode(),
    b"wxyz",
]
RESERVED = 24
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def tree(**changes):
    made = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(TOKENS) + 3,
            "default_vocab_size": RESERVED + len(TOKENS),
            "default_num_special_tokens": RESERVED,
        },
        # Files hold more tokens than their models use.
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*TOKENS, b"unused", b"never", b"seen"])
        ],
    }
    return made | changes


def load(folder, made):
    (folder / "tekken.json").write_text(json.dumps(made))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tekken"), tree())


def by_rank(text):
    """Returns the ids: whole words that are tokens, otherwise merges of the pair of the lowest rank."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids = [1]
    for word in re.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks:
            parts = [word.encode()]
        while len(parts) > 1:
            rank, at = min(
                (ranks.get(parts[at] + parts[at + 1], len(ranks)), at)
                for at in range(len(parts) - 1)
            )
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RESERVED + ranks[part] for part in parts]
    return ids


@settings(max_examples=150, deadline=None)
@given(text=st.text("abcé wxyz😀\n", max_size=20))
def test_the_ids_are_those_of_the_ranks(tokenizer, text):
    assert tokenizer.encode(text) == by_rank(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_come_first_and_are_named(tokenizer):
    assert tokenizer.encode("[INST]ab[/INST]", add_special=False) == [3, RESERVED + 256, 4]
    assert (
        tokenizer.decode([RESERVED - 1], skip_special_tokens=False) == f"<SPECIAL_{RESERVED - 1}>"
    )
    assert tokenizer.encode("<s>", add_special=False) == [1]
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.num_ids == RESERVED + len(TOKENS)


def test_a_list_of_special_tokens_is_read(tmp_path):
    listed = [{"rank": rank, "token_str": text} for rank, text in enumerate([*SPECIAL, "[THINK]"])]
    tokenizer = load(tmp_path, tree(special_tokens=listed))
    assert tokenizer.encode("[THINK]", add_special=False) == [5]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": {"pattern": 5, "default_vocab_size": 1, "default_num_special_tokens": 1}},
        {"vocab": [5]},
        {"vocab": [{"token_bytes": "?"}]},
        {"special_tokens": [{"rank": "x", "token_str": "y"}]},
        {"special_tokens": [{"rank": 0, "token_str": "no bos"}]},
    ],
)
def test_a_malformed_file_is_named(tmp_path, changes):
    with pytest.raises(BadCheckpoint, match=r"tekken\.json is malformed"):
        load(tmp_path, tree(**changes))
