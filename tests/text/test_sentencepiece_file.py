"""SentencePiece models get SentencePiece's ids. Truth is its algorithms, written out here, and the library itself."""

import io
import json
import struct
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from jaxkv.errors import BadCheckpoint
from jaxkv.text.detokenize import Detokenizer, text_after
from jaxkv.text.sentencepiece_file import (
    looks_like_sentencepiece,
    read_sentencepiece,
    to_tokenizer_json,
)
from jaxkv.text.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "▁▁", "▁▁▁", "▁▁▁▁", "ca", "é"]


def varint(number):
    number &= 2**64 - 1
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number, value):
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def model_of(
    words=WORDS,
    *,
    algorithm=BPE,
    byte_fallback=True,
    prefix=True,
    strips=False,
    user_defined=(),
    bos=1,
    eos=2,
):
    """Returns a serialized model; earlier words have higher scores, and runs of spaces the lowest."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(word, 0.0, USER_DEFINED) for word in user_defined]
    for rank, word in enumerate(words):
        score = -1e9 if algorithm == BPE and not word.strip("▁") else -1.0 - rank
        pieces.append((word, score, NORMAL))
    content = b"".join(
        field(
            1,
            field(1, text.encode())
            + varint(2 << 3 | 5)
            + struct.pack("<f", score)
            + (field(3, kind) if kind != NORMAL else b""),
        )
        for text, score, kind in pieces
    )
    trainer = field(3, algorithm) + field(35, int(byte_fallback)) + field(41, bos) + field(42, eos)
    normalizer = field(1, b"identity") + field(3, int(prefix)) + field(4, int(strips))
    return content + field(2, trainer) + field(3, normalizer), pieces


def normalized(text, *, prefix, strips):
    if strips:
        text = " ".join(part for part in text.split(" ") if part)
    if prefix and text:
        text = " " + text
    return text.replace(" ", "▁")


def ids_of_parts(parts, pieces):
    index = {text: at for at, (text, _, _) in enumerate(pieces)}
    kinds = {text: kind for text, _, kind in pieces}
    ids = []
    for part in parts:
        if kinds.get(part) in (NORMAL, USER_DEFINED):
            ids.append(index[part])
        elif "<0x00>" in index:
            ids += [index[f"<0x{byte:02X}>"] for byte in part.encode()]
        elif not ids or ids[-1] != 0:
            ids.append(0)
    return ids


def bpe(text, pieces):
    """Merges the pair of the best score, the leftmost of several, until no pair is a piece."""
    scores = {word: score for word, score, kind in pieces if kind == NORMAL}
    parts = list(text)
    while True:
        found = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not found:
            return ids_of_parts(parts, pieces)
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def unigram(text, pieces):
    """Returns the segmentation with the highest sum of scores."""
    scores = {word: score for word, score, kind in pieces if kind == NORMAL}
    unknown = min(scores.values()) - 10
    best = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [
            (best[start][0] + scores[text[start:end]], [*best[start][1], text[start:end]])
            for start in range(end)
            if text[start:end] in scores
        ]
        if text[end - 1] not in scores:
            ways.append((best[end - 1][0] + unknown, [*best[end - 1][1], text[end - 1]]))
        best.append(max(ways, key=lambda way: way[0]))
    return ids_of_parts(best[-1][1], pieces)


def library_of(content, settings=None, added=None):
    model = read_sentencepiece(content, "m")
    assert model.is_convertible()
    tree = to_tokenizer_json(model, {"add_bos_token": False} | (settings or {}), added or {})
    return Tokenizer.from_str(json.dumps(tree))


# Made once for all drawn examples.
known_model, known_library = cache(model_of), cache(library_of)
TEXTS = st.text("abc é😀\n  ", max_size=24)


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("algorithm", [BPE, UNIGRAM])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_ids_are_those_of_the_algorithm(algorithm, strips, prefix, byte_fallback, text):
    content, pieces = known_model(
        algorithm=algorithm, byte_fallback=byte_fallback, prefix=prefix, strips=strips
    )
    wanted = normalized(text, prefix=prefix, strips=strips)
    encode = bpe if algorithm == BPE else unigram
    assert known_library(content).encode(text).ids == encode(wanted, pieces)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), word=st.sampled_from(["", "a", "é"]))
def test_runs_of_spaces_are_merged_from_the_left(count, word):
    content, pieces = known_model()
    text = " " * count + word
    assert known_library(content).encode(text).ids == bpe("▁" + text.replace(" ", "▁"), pieces)


def test_the_text_of_a_byte_piece_is_not_that_byte():
    for algorithm in (BPE, UNIGRAM):
        content, _ = model_of([*WORDS, "<", "0", "x", "A", ">"], algorithm=algorithm)
        assert library_of(content).decode(library_of(content).encode("<0x0A>").ids) == "<0x0A>"
        assert 3 + 0x0A not in library_of(content).encode("<0x0A>").ids


def test_user_defined_pieces_are_never_split():
    content, pieces = model_of(user_defined=["bca", "▁▁▁"], prefix=False)
    index = {text: at for at, (text, _, _) in enumerate(pieces)}
    assert library_of(content).encode("abcab").ids == [index["a"], index["bca"], index["b"]]
    assert library_of(content).encode("a    b").ids == [
        index["a"],
        index["▁▁▁"],
        index["▁"],
        index["b"],
    ]


def write(folder, content, **files):
    (folder / "tokenizer.model").write_bytes(content)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("flags", "begin", "end"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_a_directory_with_a_sentencepiece_model_alone_is_read(tmp_path, flags, begin, end):
    content, pieces = model_of()
    ours = write(tmp_path, content, tokenizer_config=flags)
    assert ours.encode("ab c") == [*begin, *bpe("▁ab▁c", pieces), *end]
    assert ours.decode(ours.encode("ab é😀\n")) == "ab é😀\n"
    assert ours.encode("<s>", add_special=False) == [1]
    assert ours.eos_ids == (2,)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.is_special(1)


def test_a_missing_bos_is_not_added(tmp_path):
    content, pieces = model_of(bos=-1)
    ours = write(tmp_path, content)
    assert "bos_token" not in ours.special_tokens
    assert ours.encode("ab") == bpe("▁ab", pieces)


def test_add_prefix_space_false_drops_the_prefix(tmp_path):
    content, pieces = model_of()
    ours = write(
        tmp_path, content, tokenizer_config={"add_prefix_space": False, "add_bos_token": False}
    )
    assert ours.encode("ab") == bpe("ab", pieces)
    assert ours.decode(ours.encode(" ab")) == " ab"


def test_listed_tokens_follow_the_pieces_and_rename_unused_ones(tmp_path):
    content, pieces = model_of()
    size, at = len(pieces), len(pieces) - 1
    listed = {
        str(at): {"content": "<tool>", "special": False},
        str(size): {"content": "<|im_end|>", "special": True},
    }
    ours = write(tmp_path, content, tokenizer_config={"added_tokens_decoder": listed})
    assert ours.encode("<tool><|im_end|>", add_special=False) == [at, size]
    assert ours.decode([at, size]) == "<tool>"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return write(tmp_path_factory.mktemp("m"), known_model()[0])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_pieces_of_a_stream_add_up_to_the_text(loaded, data):
    ours = loaded
    ids = data.draw(st.lists(st.integers(0, len(known_model()[1]) - 1), max_size=20))
    cut = data.draw(st.integers(0, len(ids)))
    stream = Detokenizer(ours, ids[:cut])
    text = "".join(map(stream.push, ids[cut:])) + stream.finish()
    assert text == text_after(ours, ids[:cut], ids[cut:])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (model_of()[0][:-3], "cut off"),
        (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\0", "too long"),
        (field(1, field(1, b"\xff") + b"\0"), "is no SentencePiece model"),
        (field(2, b""), "it has no pieces"),
        (field(1, field(1, 5)), "where bytes are expected"),
    ],
)
def test_a_malformed_model_is_refused(content, reason):
    with pytest.raises(BadCheckpoint, match=f"m is no SentencePiece model: .*|{reason}") as caught:
        read_sentencepiece(content, "m")
    assert reason in str(caught.value)


def test_a_file_of_tiktoken_is_told_apart():
    assert looks_like_sentencepiece(model_of()[0])
    assert not looks_like_sentencepiece(b"IQ== 0\nIg== 1\n")
    assert not looks_like_sentencepiece(b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
        {
            "model_type": "bpe",
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<turn>", "\n\n", "▁▁"],
        },
        {"model_type": "unigram", "byte_fallback": True},
        {"model_type": "unigram"},
    ],
)
def test_trained_models_get_the_ids_and_texts_of_the_library(options):
    spm = pytest.importorskip(
        "sentencepiece", reason="needs sentencepiece: pip install sentencepiece"
    )
    lines = [
        f"the {word} of a small model, {n} times 東京 é"
        for n in range(40)
        for word in ("end", "text")
    ]
    file = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        vocab_size=400 if options.get("byte_fallback") else 70,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    theirs = spm.SentencePieceProcessor(model_proto=file.getvalue())
    ours = library_of(file.getvalue())
    texts = [
        "",
        " ",
        "the end",
        "  two  spaces ",
        "<turn>x\n\n\ny",
        "日本 é 😀",
        "a\tb",
        "smalltext" * 9,
    ]
    for text in (*texts, *lines[:4], *(" " * n + "x" for n in range(9))):
        assert ours.encode(text).ids == theirs.encode(text)
        if theirs.unk_id() not in theirs.encode(text):
            assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_flags_of_listed_tokens_do_not_rename_known_pieces():
    content, pieces = model_of()
    ours = library_of(content, added={5: AddedToken("ab", special=True)})
    assert ours.id_to_token(5) == pieces[5][0]
