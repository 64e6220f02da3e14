"""Mistral's `tekken.json` as the JSON of a tokenizer.json with the same ids."""

import base64
import binascii
from collections.abc import Mapping, Sequence

from jaxkv.errors import BadCheckpoint
from jaxkv.text.byte_alphabet import byte_alphabet
from jaxkv.wording import shown

# The special tokens of files that do not list theirs; the rest of the reserved ids is named by number.
_UNLISTED = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Names of Mistral's special tokens."""


def tekken_to_json(tree: Mapping[str, object], where: str) -> dict[str, object]:
    """Returns the JSON of a tokenizer.json: byte-level BPE behind the special ids, with `<s>` before each text.

    Args:
        tree: the JSON of tekken.json.
        where: its name in messages.

    Raises:
        BadCheckpoint: the file is malformed.
    """
    try:
        return _convert(tree)
    except (binascii.Error, KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{where} is malformed: {error!r}") from None


def _convert(tree: Mapping[str, object]) -> dict[str, object]:
    config = _object(tree["config"])
    pattern = config["pattern"]
    if not isinstance(pattern, str):
        raise ValueError(f"the pattern is {shown(pattern)}")
    size, reserved = (
        _count(config["default_vocab_size"]),
        _count(config["default_num_special_tokens"]),
    )
    special = _special_tokens(tree, reserved)
    tokens = [
        base64.b64decode(_text(_object(each)["token_bytes"]), validate=True)
        for each in _list(tree["vocab"])[: size - reserved]
    ]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocab = {_spelled(token): reserved + rank for token, rank in ranks.items()}
    vocab |= {text: index for index, text in enumerate(special)}
    return {
        "version": "1.0",
        "added_tokens": [_added(index, content) for index, content in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(add_prefix_space=False, use_regex=False),
            ],
        },
        "post_processor": _begin_with("<s>", special.index("<s>")),
        "decoder": _byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A word that is a token is this token, even if no merges lead to it.
            "ignore_merges": True,
            "vocab": vocab,
            "merges": _merges(tokens, ranks),
        },
    }


def _added(index: int, content: str) -> dict[str, object]:
    """Returns the entry of a special token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def _byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, object]:
    """Returns the step between bytes and the characters that stand for them in the vocabulary."""
    options = {"add_prefix_space": add_prefix_space, "use_regex": use_regex}
    return {"type": "ByteLevel", "trim_offsets": True, **options}


def _begin_with(token: str, index: int) -> dict[str, object]:
    """Returns the step that puts a special token before each text."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _special_tokens(tree: Mapping[str, object], reserved: int) -> list[str]:
    """Returns the texts of the ids before the vocabulary."""
    listed = tree.get("special_tokens")
    texts = dict(enumerate(_UNLISTED))
    if listed is not None:
        found = [_object(each) for each in _list(listed)]
        texts = {_count(each["rank"]): _text(each["token_str"]) for each in found}
    return [texts.get(index, f"<SPECIAL_{index}>") for index in range(reserved)]


def _merges(tokens: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Returns the merges by rank: each way to make a token of two others; those with early parts come first."""
    merges = []
    for rank, token in enumerate(tokens):
        pairs = [
            (ranks[left], ranks[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in ranks and (right := token[cut:]) in ranks
        ]
        merges += [(rank, *pair) for pair in sorted(pairs)]
    return [[_spelled(left), _spelled(right)] for *_, left, right in merges]


def _spelled(token: bytes) -> str:
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in token)


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown(value)} is no JSON object")
    return value


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**24:
        raise ValueError(f"{shown(value)} is no number of tokens")
    return value
