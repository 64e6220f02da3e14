"""What a tokenizer.json may do to the length of a text is bounded, and the bounds hold for every component."""

import base64
import json
import math
import struct
import sys
import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxkv import default_model
from jaxkv.errors import BadCheckpoint
from jaxkv.text.prompts import prompt_ids
from jaxkv.text.tokenizer import load_tokenizer
from jaxkv.text.tokenizer_bounds import _FIXED, MAX_ADDED_IDS, MAX_TOKEN_BYTES, read_bounds
from tests.example_counts import examples

LETTERS = "abcdefghijklmnopqrstuvwxyz ▁"


def library_of(**parts):
    library = Tokenizer(models.BPE({letter: at for at, letter in enumerate(LETTERS)}, []))
    for name, part in parts.items():
        setattr(library, name, part)
    return library


def load(folder, tree):
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return load_tokenizer(folder)


def tree_of(**changes):
    return {**json.loads(library_of().to_str()), **changes}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(size, rest):
    return base64.b64encode(struct.pack("<I", size) + rest).decode()


HUNDREDFOLD = [replace({"String": "e"}, "e" * 100)] * 6
A = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [A, {"Sequence": {"id": "B", "type_id": 0}}]
MARK = {"SpecialToken": {"id": "s", "type_id": 0}}
BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
# Each of these aborts the process, or fills the memory, when the library loads it or uses it.
HOSTILE = {
    "a chain of replacements": (
        {"normalizer": {"type": "Sequence", "normalizers": HUNDREDFOLD}},
        r"can make a text 1e\+12 times as long; the limit is 1048576",
    ),
    "a chain within a chain": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Sequence", "normalizers": HUNDREDFOLD[:3]}] * 2,
            }
        },
        r"can make a text 1e\+12 times as long",
    ),
    "a chain that meets an added token": (
        {
            "normalizer": {"type": "Sequence", "normalizers": HUNDREDFOLD[:3]},
            "added_tokens": [
                {
                    "id": 100,
                    "content": "e" * 100,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": True,
                    "special": False,
                }
            ],
        },
        r"has added tokens that can become 1e\+08 bytes",
    ),
    "a chain of decoders": (
        {"decoder": {"type": "Sequence", "decoders": HUNDREDFOLD}},
        r"has a token that can become 3e\+12 bytes of text; the limit is 16384",
    ),
    "an expression that matches nothing": (
        {"normalizer": replace({"Regex": ""}, "x" * 2**21)},
        "can make a text 4.1943e",
    ),
    "a text that is nothing": (
        {"normalizer": replace({"String": ""}, "x" * 2**21)},
        "can make a text 4.1943e",
    ),
    "a long beginning": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 2**20}},
        "can make a text 1.04858e",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}},
        r"can make a text 1.09951e\+12 times",
    ),
    "normal bytes of bytes": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
        r"can make a text 1.09951e\+12 times",
    ),
    "more bytes than a float counts": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 10**4}},
        "can make a text inf times",
    ),
    "a template of many marks": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [MARK] * 10**4 + [A],
                "pair": PAIR,
                "special_tokens": {"s": {"id": "s", "ids": [0] * 10**4, "tokens": ["a"] * 10**4}},
            }
        },
        r"adds 1e\+08 ids to a prompt",
    ),
    "a template of many texts": (
        {
            "post_processor": {
                "type": "Sequence",
                "processors": [
                    {
                        "type": "TemplateProcessing",
                        "single": [A] * 2000,
                        "pair": PAIR,
                        "special_tokens": {},
                    }
                ]
                * 2,
            }
        },
        r"can make a text 4e\+06 times",
    ),
    "a table of characters that is cut off": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(2**32 - 1, b"x")}},
        "precompiled_charsmap of 5 bytes is cut off",
    ),
    "a table of characters with a long text": (
        {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": charsmap(4, b"0000" + b"x" * 2**21 + b"\0"),
            }
        },
        "can make a text 2.09715e",
    ),
    "a long token": (
        {"model": {"type": "WordLevel", "vocab": {"a" * 10**6: 0, "b": 1}, "unk_token": "b"}},
        r"has a token that can become 1e\+06 bytes of text",
    ),
    "a component of no type": (
        {"normalizer": {"pattern": {"String": "e"}, "content": "ee"}},
        "its normalizer has the unknown type None",
    ),
    "a component of an unknown type": (
        {"decoder": {"type": "Twice"}},
        "its decoder has the unknown type 'Twice'",
    ),
    "a deep sequence": (
        {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 200 + "]}" * 200)},
        "nested too deeply",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_tokenizer_whose_texts_could_grow_without_bound_is_refused(tmp_path, case):
    changes, reason = HOSTILE[case]
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        load(tmp_path, tree_of(**changes))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padding_to_a_huge_length_is_switched_off_before_anything_is_encoded(tmp_path):
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    assert load(tmp_path, tree_of(padding=padding)).encode("ab") == [0, 1]


def test_a_text_that_grows_too_far_is_refused_and_others_are_encoded(tmp_path):
    steps = [replace({"String": "e"}, "e" * 100)] * 2
    tree = tree_of(normalizer={"type": "Sequence", "normalizers": steps})
    tokenizer = load(tmp_path, tree)
    assert len(tokenizer.encode("ab" * 5000)) == 10000
    assert len(tokenizer.encode("e")) == 10000
    with pytest.raises(ValueError, match="makes more than 16777216 bytes of this text of 5000"):
        tokenizer.encode("e" * 5000)


def test_a_usual_chain_of_normalizers_is_no_reason_to_refuse(tmp_path):
    """Fine-tuned ALBERT: in the worst case 9680 times as long, but never in truth."""
    steps = [
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        replace({"Regex": " {2,}"}, " "),
    ]
    cutting = json.loads(pre_tokenizers.Metaspace().__getstate__())
    tree = tree_of(
        normalizer={"type": "Sequence", "normalizers": steps * 2},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, cutting],
        },
    )
    assert len(load(tmp_path, tree).encode("a" * 10**5)) == 10**5 + 1


def test_a_panic_of_the_library_is_a_value_error(tmp_path):
    """An expression that takes too long, and a decoder that strips more than there is."""
    slow = replace({"Regex": "(a+)+$"}, "x")
    strip = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    tokenizer = load(tmp_path, tree_of(normalizer=slow, decoder=strip))
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode the text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "☃")
    with pytest.raises(ValueError, match="the tokenizer cannot decode the ids: slice index"):
        tokenizer.decode([0])


BASES = {
    "normalizer": normalizers.Normalizer,
    "pre_tokenizer": pre_tokenizers.PreTokenizer,
    "post_processor": processors.PostProcessor,
    "decoder": decoders.Decoder,
}
WITH_OPTIONS = {"Sequence", "Replace", "Prepend", "Precompiled", "TemplateProcessing", "Split"}


@pytest.mark.parametrize("kind", BASES)
def test_every_kind_that_the_library_has_is_known(kind):
    """A tokenizer with a component that a new release of the library brings must not be refused."""
    base = BASES[kind]
    room = vars(sys.modules[base.__module__]).items()
    found = {name for name, item in room if isinstance(item, type) and issubclass(item, base)}
    known = {*_FIXED[kind], *WITH_OPTIONS, "ByteLevel", "Punctuation"}
    assert len(found) > 5
    assert found - {base.__name__} <= known


def test_no_character_grows_further_than_its_form_may():
    """UAX #15's factors, for every character that there is."""
    for form, factor in (("NFC", 3), ("NFD", 3), ("NFKC", 11), ("NFKD", 11)):
        for code in range(sys.maxunicode + 1):
            letter = chr(code)
            if 0xD800 <= code < 0xE000 or unicodedata.is_normalized(form, letter):
                continue
            grown = unicodedata.normalize(form, letter)
            assert len(grown.encode()) <= factor * len(letter.encode())
            # What is composed of it takes at most four.
            assert form not in ("NFD",) or len(grown) <= 4


NORMALIZERS = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.ByteLevel(),
    normalizers.StripAccents(),
    normalizers.Strip(),
    normalizers.Nmt(),
    normalizers.BertNormalizer(),
    normalizers.Prepend("▁▁"),
    normalizers.Replace("a", "bcd"),
    normalizers.Replace("ab", ""),
    normalizers.Replace("abc", "é"),
    normalizers.Replace(Regex("a*"), "bb"),
    normalizers.Replace(Regex("(?=a)"), "☃"),
]
TEXTS = st.text(
    st.one_of(
        st.sampled_from("aabbccAİ \u1f82\u0344\ufdfa\u0301중ééⱥ\u00a0▁"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=12,
)


@settings(max_examples=examples(400), deadline=None)
@given(chain=st.lists(st.sampled_from(NORMALIZERS), min_size=1, max_size=3), text=TEXTS)
def test_no_chain_of_normalizers_makes_more_of_a_text_than_its_bound(chain, text):
    library = library_of(normalizer=normalizers.Sequence(chain))
    bounds = read_bounds(json.loads(library.to_str()), "here")
    try:
        grown = len(library.normalizer.normalize_str(text).encode())
    except BaseException as error:  # The library has panics of its own.
        assume(type(error).__name__ != "PanicException")
        raise
    assert grown <= bounds.growth * max(1, len(text.encode()))


DECODERS = [
    decoders.BPEDecoder(),
    decoders.BPEDecoder(suffix=""),
    decoders.ByteFallback(),
    decoders.ByteLevel(),
    decoders.CTC(),
    decoders.CTC(word_delimiter_token=""),
    decoders.Fuse(),
    decoders.Metaspace(),
    decoders.Replace("a", "bcd"),
    decoders.Strip("a", 1, 0),
    decoders.WordPiece(),
    None,
]


@settings(max_examples=examples(400), deadline=None)
@given(
    decoder=st.sampled_from(DECODERS),
    pieces=st.lists(st.sampled_from(["a", "ab", "é", "<0xE2>", "Ġb", "▁", "##a", "Ã"]), max_size=8),
)
def test_no_decoder_makes_more_of_a_token_than_its_bound(decoder, pieces):
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))} or {"a": 0}
    library = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    if decoder is not None:
        library.decoder = decoder
    tree = json.loads(library.to_str())
    text = library.decode([vocab[piece] for piece in pieces])
    growth, added = effect_of("decoder", tree["decoder"])
    most = sum(growth * len(piece.encode()) + added for piece in pieces)
    assert len(text.encode()) <= most


def effect_of(kind, tree):
    from jaxkv.text.tokenizer_bounds import _Reader

    effect = _Reader("here").effect(kind, tree)
    return effect.growth, effect.added


def byte_level(**parts):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    library = Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(library, name, part)
    return library


def byte_fallback(model=models.BPE):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁▁"]
    if model is models.Unigram:
        library = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, True))
    else:
        vocab = {piece: at for at, piece in enumerate(pieces)}
        merges = [("a", "b"), ("▁", "▁")]
        library = Tokenizer(
            models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return library


def with_tokens(library, *tokens):
    library.add_tokens(list(tokens))
    return library


BOUNDED = {
    "byte level": byte_level(),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "compatible": byte_level(normalizer=normalizers.NFKC()),
    "shortened": byte_level(normalizer=normalizers.Replace("ababab", "ab")),
    "split": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex("a+"), "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=True),
            ]
        )
    ),
    "byte fallback": byte_fallback(),
    "unigram": byte_fallback(models.Unigram),
    "added": with_tokens(byte_level(), AddedToken("abababababab", normalized=False)),
    "added and composed": with_tokens(
        byte_level(normalizer=normalizers.NFC()), AddedToken("e\u0301ab" * 3, normalized=True)
    ),
    "space beside": with_tokens(
        byte_level(), AddedToken("ab", normalized=False, lstrip=True, rstrip=True)
    ),
    "marked": byte_level(
        post_processor=processors.TemplateProcessing("a $A", None, [("a", 0)]),
    ),
}
UNBOUNDED = {
    "words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "word pieces": Tokenizer(models.WordPiece({"a": 0}, unk_token="a")),
    "fused unknowns": Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)], 0, False)),
    "letters": library_of(),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "accents": byte_level(normalizer=normalizers.StripAccents()),
    "dropped": byte_level(normalizer=normalizers.Replace("a", "")),
    "expression": byte_level(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "removed": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    ),
    "white space": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        )
    ),
    "a mark for the space behind bytes": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()]
        )
    ),
    "no text": byte_level(
        post_processor=processors.TemplateProcessing("a", None, [("a", 0)]),
    ),
    "space beside normal tokens": with_tokens(
        byte_level(normalizer=normalizers.Replace("x", " ")),
        AddedToken("ab", normalized=True, lstrip=True),
    ),
}


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=examples(200), deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(["ab", "abab", "    ", "abababababab", "e\u0301ab" * 3, "é", "\u1f82"]),
            st.sampled_from(["\u03b1\u0313\u0300\u0345", "\n" * 20, "각", "☃", "ababab", "\u00a0"]),
            TEXTS,
        ),
        max_size=8,
    )
)
def test_no_text_has_fewer_tokens_than_its_least(kind, parts):
    library, text = BOUNDED[kind], "".join(parts) * 3
    bounds = read_bounds(json.loads(library.to_str()), "here")
    assert bounds.least_tokens(text) <= len(library.encode(text).ids)
    assert not math.isinf(bounds.characters)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_texts_that_may_have_any_number_of_tokens_have_no_least(kind):
    bounds = read_bounds(json.loads(UNBOUNDED[kind].to_str()), "here")
    assert bounds.least_tokens("x" * 10**6) == 0


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    tokenizer = load_tokenizer(default_model.path())
    longest = max(map(len, tokenizer._library.get_vocab()))
    text = "x" * (1024 * longest)
    assert len(prompt_ids(text, tokenizer, 4096, max_tokens=1024)) > 1024, "it might have fitted"
    monkeypatch.setattr(tokenizer, "_library", None)
    with pytest.raises(ValueError, match="at least 1025 tokens, but at most 1024 fit"):
        prompt_ids(text + "x", tokenizer, 4096, max_tokens=1024)


def test_the_limits_are_far_from_usual_tokens():
    """A token of 1024 spaces, which byte-level tokenizers write in two bytes each, is usual enough."""
    bounds = byte_level(decoder=decoders.ByteLevel())
    bounds.add_tokens(["Ġ" * 1024])
    read_bounds(json.loads(bounds.to_str()), "here")
    assert MAX_TOKEN_BYTES > 2 * 3 * 1024
    assert MAX_ADDED_IDS > 100
