"""A SentencePiece model (`tokenizer.model`) as the JSON of a tokenizer.json with the same ids."""

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from jaxkv.errors import BadCheckpoint
from jaxkv.wording import shown

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
# Below the score of any text, for pieces that no text becomes.
_NEVER = -1e6


class _Kind(IntEnum):
    """Kinds of pieces in sentencepiece_model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a SentencePiece model that encoding and decoding need.

    Attributes:
        pieces: the vocabulary; a piece's id is its place.
        algorithm: 1 for unigram, 2 for BPE.
        byte_fallback: whether an unknown character becomes its bytes.
        unk_id, bos_id, eos_id: ids of special pieces; negative for none.
        charsmap: the compiled table of the normalization; empty for none.
        dummy_prefix: whether a text begins with a space.
        strips_spaces: whether spaces at both ends are dropped and runs become one space.
        suffix_spaces: whether a space belongs to the piece before it.
    """

    pieces: tuple[_Piece, ...]
    algorithm: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    dummy_prefix: bool
    strips_spaces: bool
    suffix_spaces: bool

    def named(self) -> dict[str, str]:
        """Returns the names and texts of the special pieces."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id}
        return {
            name: self.pieces[at].text for name, at in ids.items() if 0 <= at < len(self.pieces)
        }

    def is_convertible(self) -> bool:
        """Whether `to_tokenizer_json` gives the model's ids."""
        return self.algorithm in (_UNIGRAM, _BPE) and not self.suffix_spaces


def looks_like_sentencepiece(content: bytes) -> bool:
    """Whether a file begins as a SentencePiece model; tiktoken's files of the same name are lines of base64."""
    return content[:1] == b"\n" and not content[1:2].isspace() and b"\0" in content[:64]


def read_sentencepiece(content: bytes, where: str) -> SentencePieceModel:
    """Reads a serialized `ModelProto`.

    Args:
        content: the file.
        where: its name in messages.

    Raises:
        BadCheckpoint: the file is malformed.
    """
    try:
        return _read_model(content)
    except (IndexError, UnicodeDecodeError, struct.error, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{where} is no SentencePiece model: {error}") from None


def _read_model(content: bytes) -> SentencePieceModel:
    pieces: list[_Piece] = []
    trainer: dict[int, object] = {}
    normalizer: dict[int, object] = {}
    for field, value in _fields(content):
        if field == 1:
            found = dict(_fields(_bytes(value)))
            score = struct.unpack("<f", _bytes(found.get(2, b"\0\0\0\0")))[0]
            kind = _int(found.get(3, _Kind.NORMAL))
            pieces.append(_Piece(_bytes(found.get(1, b"")).decode(), score, kind))
        elif field == 2:
            trainer = dict(_fields(_bytes(value)))
        elif field == 3:
            normalizer = dict(_fields(_bytes(value)))
    if not pieces:
        raise ValueError("it has no pieces")
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=_int(trainer.get(3, _UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=next((i for i, p in enumerate(pieces) if p.kind == _Kind.UNKNOWN), -1),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
        charsmap=_bytes(normalizer.get(2, b"")),
        dummy_prefix=bool(normalizer.get(3, 1)),
        strips_spaces=bool(normalizer.get(4, 1)),
        suffix_spaces=bool(trainer.get(24, 0)),
    )


def _fields(message: bytes) -> Iterator[tuple[int, object]]:
    """Yields number and value of a protobuf message's fields: ints, or bytes of any other wire type."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"byte {at} has the unknown wire type {wire}")
        if at + size > len(message):
            raise ValueError(f"it is cut off at byte {len(message)}")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"the number at byte {at} is too long")


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"{shown(value)} stands where bytes are expected")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{shown(value)} stands where a number is expected")
    return value


def _signed(value: object) -> int:
    number = _int(value)
    return number - 2**64 if number >= 2**63 else number


def to_tokenizer_json(
    model: SentencePieceModel,
    settings: Mapping[str, object],
    added: Mapping[int, "tokenizers.AddedToken"],
) -> dict[str, object]:
    """Returns the JSON of a tokenizer.json whose ids are those of SentencePiece.

    Control pieces become special tokens, user-defined pieces added tokens. The text after each of them begins with the
    dummy prefix again, as in the files that Transformers 4 wrote for these models.

    Args:
        model: the SentencePiece model.
        settings: tokenizer_config.json: `add_bos_token` (default: true), `add_eos_token` (false) and `add_prefix_space`
            (what the model does).
        added: id -> listed added token; one that names a piece anew replaces its text.
    """
    pieces = _renamed(model.pieces, added)
    prefix = model.dummy_prefix and settings.get("add_prefix_space") is not False
    tokens = [
        {
            "id": index,
            "content": piece.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            # Matched behind the normalizer, where spaces are marks; the prefix would go into the token's own text.
            "normalized": piece.kind == _Kind.USER_DEFINED and not prefix,
            "special": piece.kind != _Kind.USER_DEFINED,
        }
        for index, piece in enumerate(pieces)
        if _is_added(piece, prefix=prefix)
    ]
    steps = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": tokens,
        "normalizer": _normalizer(model, prefix=prefix),
        "pre_tokenizer": None,
        "post_processor": _template(model, pieces, settings),
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(model, pieces) if model.algorithm == _BPE else _unigram(model, pieces),
    }


def _renamed(
    pieces: Sequence[_Piece], added: Mapping[int, "tokenizers.AddedToken"]
) -> list[_Piece]:
    """Returns the pieces, with the names that a list of added tokens gives to some, such as to unused ones."""
    renamed, texts = list(pieces), {piece.text for piece in pieces}
    for index, token in added.items():
        if index < len(renamed) and token.content not in texts:
            kind = _Kind.CONTROL if token.special else _Kind.USER_DEFINED
            renamed[index] = replace(renamed[index], text=token.content, kind=kind)
    return renamed


def _is_added(piece: _Piece, *, prefix: bool) -> bool:
    if piece.kind == _Kind.USER_DEFINED:
        # With a prefix the token is matched in the text as given, which has no marks of spaces.
        return not (prefix and _SPACE in piece.text)
    return piece.kind in (_Kind.CONTROL, _Kind.UNKNOWN)


def _normalizer(model: SentencePieceModel, *, prefix: bool) -> dict[str, object]:
    steps: list[dict[str, object]] = []
    if model.charsmap:
        table = base64.b64encode(model.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if model.strips_spaces:
        steps.append(_replace({"Regex": r"\A +| +\z"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append(_replace({"String": " "}, _SPACE))
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _template(
    model: SentencePieceModel, pieces: Sequence[_Piece], settings: Mapping[str, object]
) -> dict[str, object] | None:
    wanted = (
        (model.bos_id, settings.get("add_bos_token", True)),
        (model.eos_id, settings.get("add_eos_token", False)),
    )
    begin, end = ([at] if flag and 0 <= at < len(pieces) else [] for at, flag in wanted)
    if not begin and not end:
        return None

    def token(index: int) -> dict[str, object]:
        return {"SpecialToken": {"id": pieces[index].text, "type_id": 0}}

    text: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*map(token, begin), text, *map(token, end)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            pieces[at].text: {"id": pieces[at].text, "ids": [at], "tokens": [pieces[at].text]}
            for at in (*begin, *end)
        },
    }


def _unigram(model: SentencePieceModel, pieces: Sequence[_Piece]) -> dict[str, object]:
    reachable = (_Kind.NORMAL, _Kind.USER_DEFINED)
    return {
        "type": "Unigram",
        "unk_id": model.unk_id if model.unk_id >= 0 else None,
        "vocab": [
            [piece.text, piece.score if piece.kind in reachable else _NEVER] for piece in pieces
        ],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel, pieces: Sequence[_Piece]) -> dict[str, object]:
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    parts = {p.text for p in pieces if p.kind in (_Kind.NORMAL, _Kind.USER_DEFINED, _Kind.UNUSED)}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for index, piece in enumerate(pieces):
        if piece.kind not in (_Kind.NORMAL, _Kind.USER_DEFINED):
            continue
        # SentencePiece merges the pair whose result has the highest score, independently of how the result is made.
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in parts and right in parts:
                tie = _order_of_run(left, right)
                merges.append((-piece.score, tie, index, vocab[left], vocab[right], left, right))
    merges.sort()
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[model.unk_id].text if model.unk_id >= 0 else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [[left, right] for *_, left, right in merges],
    }


def _order_of_run(left: str, right: str) -> int:
    """Returns the order of merges of equal scores: 0, except for runs of spaces.

    Pieces of spaces alone often have equal scores, and SentencePiece merges the leftmost pair first: a run becomes
    pieces as long as possible from the left. So do merges of equal parts, short ones first, and then of the longest.
    """
    if set(left) != {_SPACE} or set(right) != {_SPACE}:
        return 0
    length = len(left) + len(right)
    return length if len(left) == len(right) else 2**20 - length
