"""Bounds of a tokenizer.json, read from its JSON: how much longer a text can become, and how few tokens it can have."""

import base64
import binascii
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.wording import clip

MAX_GROWTH = 2**20
"""Most times that encoding may lengthen a text; a tokenizer.json beyond it is refused."""

MAX_GROWN_BYTES = 2**24
"""Bytes that any text may grow to before it is split into tokens."""

MAX_TOKEN_BYTES = 2**14
"""Most bytes of the text of one token."""

MAX_ADDED_IDS = 2**12
"""Most ids that a post-processor may add to a prompt."""

_USUAL_GROWTH = 16
"""Times that a text may grow if that is more than `MAX_GROWN_BYTES`."""

_MAX_DEPTH = 64
_Tree = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Effect:
    """The effect of a component, or of several in a row, on the length of a text.

    Attributes:
        growth: most bytes of output per byte of input; for a post-processor, ids per id.
        added: most bytes added to each token, or ids added to a prompt. For normalizers and pre-tokenizers, additions
            are part of `growth`.
        merged: most characters of input per character of output; infinite if it can drop characters.
    """

    growth: float = 1.0
    added: float = 0.0
    merged: float = 1.0

    def then(self, other: "_Effect") -> "_Effect":
        """Returns the effect of this component followed by another."""
        return _Effect(
            self.growth * other.growth,
            self.added * other.growth + other.added,
            self.merged * other.merged,
        )


_NONE = _Effect()
_DROPS = _Effect(merged=math.inf)
# In UTF-8, Unicode's canonical normal forms take up to 3 times the bytes, the compatibility forms up to 11 times
# (UAX #15), and one character is composed of at most 4. Lower case takes up to 1.5 times the bytes.
_FIXED = {
    "normalizer": {
        "NFC": _Effect(3.0, merged=4.0),
        "NFD": _Effect(3.0),
        "NFKC": _Effect(11.0, merged=4.0),
        "NFKD": _Effect(11.0),
        "Lowercase": _Effect(2.0),
        "ByteLevel": _Effect(2.0),
        "StripAccents": _DROPS,
        "Strip": _DROPS,
        "Nmt": _DROPS,
        "BertNormalizer": _Effect(12.0, merged=math.inf),
    },
    "pre_tokenizer": {
        "BertPreTokenizer": _DROPS,
        "CharDelimiterSplit": _DROPS,
        "Whitespace": _DROPS,
        "WhitespaceSplit": _DROPS,
        "Digits": _NONE,
        "FixedLength": _NONE,
        "UnicodeScripts": _NONE,
        # The replacement mark has up to 4 bytes, replaces each space, and precedes each piece.
        "Metaspace": _Effect(5.0),
    },
    "post_processor": {
        "BertProcessing": _Effect(added=2.0),
        "RobertaProcessing": _Effect(added=2.0),
        "ByteLevel": _NONE,
    },
    "decoder": {
        "BPEDecoder": _Effect(2.0, added=1.0),
        "ByteFallback": _NONE,
        # A byte that is no valid UTF-8 becomes U+FFFD, which has 3 bytes.
        "ByteLevel": _Effect(3.0),
        "CTC": _Effect(2.0, added=1.0),
        "Fuse": _NONE,
        "Metaspace": _NONE,
        "Strip": _NONE,
        "WordPiece": _Effect(added=1.0),
    },
}
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


@dataclass(frozen=True, slots=True)
class TextBounds:
    """Bounds on the lengths of texts before and after they are encoded.

    Attributes:
        growth: a text of n bytes has at most `growth * n` bytes before it is split into tokens.
        normalizer: the normalizer's part of that factor.
        characters: most characters of a text that one token stands for; infinite if there is no bound.
        swallows_space: whether some token absorbs any number of adjacent spaces.
    """

    growth: float
    normalizer: float
    characters: float
    swallows_space: bool

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound of the text's number of tokens."""
        if math.isinf(self.characters):
            return 0
        counted = sum(map(len, text.split())) if self.swallows_space else len(text)
        return math.ceil(counted / self.characters)

    def check_growth(self, text: bytes, library: tokenizers.Tokenizer) -> None:
        """Raises `ValueError` if encoding the text takes too much memory.

        A text that may exceed the limit is normalized in slices that cannot, and their lengths are added.
        """
        limit = max(MAX_GROWN_BYTES, _USUAL_GROWTH * len(text))
        if self.growth * len(text) <= limit:
            return
        size = max(1, int(MAX_GROWN_BYTES / self.growth))
        grown = 0
        for start in range(0, len(text), size):
            part = text[start : start + size].decode(errors="replace")
            if library.normalizer is not None:
                part = library.normalizer.normalize_str(part)
            grown += len(part.encode()) * (self.growth / self.normalizer)
            if grown > limit:
                raise ValueError(
                    f"the tokenizer's normalizer makes more than {limit} bytes of this text of {len(text)} bytes; "
                    f"shorten the text"
                )


def read_bounds(tree: _Tree, where: str) -> TextBounds:
    """Returns the bounds of a tokenizer before the library reads it.

    Args:
        tree: the JSON of tokenizer.json.
        where: name of the file in messages.

    Raises:
        BadCheckpoint: a component is of an unknown type, or a text or token could grow beyond the limits.
    """
    read = _Reader(where)
    normalizer, pre_tokenizer, template, decoder = (
        read.effect(kind, tree.get(kind))
        for kind in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    encoding = normalizer.then(pre_tokenizer)
    growth = encoding.growth * template.growth
    read.check("can make a text {} times as long", growth, MAX_GROWTH)
    read.check("adds {} ids to a prompt", template.added, MAX_ADDED_IDS)
    pieces, added = read.pieces(tree.get("model")), read.added_tokens(tree)
    contents = [str(token.get("content")) for token in added]
    longest = max((_bytes(piece) for piece in (*pieces, *contents)), default=0)
    decoded = longest * decoder.growth + decoder.added
    read.check("has a token that can become {} bytes of text", decoded, MAX_TOKEN_BYTES)
    normalized = sum(_bytes(str(t.get("content"))) for t in added if t.get("normalized"))
    normalized *= normalizer.growth
    read.check("has added tokens that can become {} bytes", normalized, MAX_GROWN_BYTES)
    return TextBounds(
        growth=growth,
        normalizer=normalizer.growth,
        characters=_characters(tree, pieces, added, normalizer, encoding.merged * template.merged),
        swallows_space=any(token.get("lstrip") or token.get("rstrip") for token in added),
    )


class _Reader:
    """Reads the components of one tokenizer.json.

    Args:
        where: name of the file in messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def effect(self, kind: str, found: object, depth: int = 0) -> _Effect:
        """Returns the effect of a component; `kind` is its key in tokenizer.json."""
        if found is None:
            return _Effect(added=1.0) if kind == "decoder" and depth == 0 else _NONE
        if not isinstance(found, Mapping) or depth > _MAX_DEPTH:
            raise self._malformed(f"its {kind} is no JSON object, or nested too deeply")
        name = found.get("type")
        if name == "Sequence":
            whole = _NONE
            for part in self._list(found.get(_PARTS[kind]), kind):
                whole = whole.then(self.effect(kind, part, depth + 1))
            return whole
        if name == "Replace" and kind in ("normalizer", "decoder"):
            return self._replaced(found)
        if name == "Prepend" and kind == "normalizer":
            # The text is inserted after each added token, and each byte may follow an added token.
            return _Effect(1.0 + _bytes(self._text(found, "prepend")))
        if name == "Precompiled" and kind == "normalizer":
            return self._precompiled(self._text(found, "precompiled_charsmap"))
        if name == "TemplateProcessing" and kind == "post_processor":
            return self._template(found)
        if name == "ByteLevel" and kind == "pre_tokenizer":
            # Each byte becomes a character of at most 2 bytes; a space is added to each piece.
            return _Effect(2.0 if found.get("add_prefix_space") is False else 4.0)
        if name in ("Split", "Punctuation") and kind == "pre_tokenizer":
            return _DROPS if found.get("behavior") == "Removed" else _NONE
        effect = _FIXED[kind].get(name) if isinstance(name, str) else None
        if effect is None:
            raise self._malformed(f"its {kind} has the unknown type {clip(repr(name), 60)}")
        return effect

    def pieces(self, model: object) -> Sequence[str]:
        """Returns the texts of a model's vocabulary."""
        found = model.get("vocab") if isinstance(model, Mapping) else None
        if found is None:  # The library rejects such a file with its own message.
            return []
        if isinstance(found, Mapping):
            return list(found)
        listed = self._list(found, "vocab")
        pieces = [item[0] for item in listed if isinstance(item, list) and item]
        if len(pieces) < len(listed) or not all(isinstance(piece, str) for piece in pieces):
            raise self._malformed("its vocab is no list of texts and scores")
        return pieces

    def added_tokens(self, tree: _Tree) -> list[_Tree]:
        """Returns the objects of "added_tokens"."""
        added = self._list(tree.get("added_tokens", []), "added_tokens")
        if not all(
            isinstance(token, Mapping) and isinstance(token.get("content"), str) for token in added
        ):
            raise self._malformed("its added_tokens are no JSON objects with a content")
        return [token for token in added if isinstance(token, Mapping)]

    def check(self, what: str, value: float, limit: int) -> None:
        """Raises `BadCheckpoint` if a value exceeds a limit; `what` is the message with `{}` for the value."""
        if value > limit:
            raise BadCheckpoint(
                f"{self._where} {what.format(f'{value:.6g}')}; the limit is {limit}"
            )

    def _replaced(self, found: _Tree) -> _Effect:
        content = self._text(found, "content")
        pattern = found.get("pattern")
        wanted = (
            pattern.get("String") if isinstance(pattern, Mapping) and len(pattern) == 1 else None
        )
        if not isinstance(wanted, str) or not wanted:
            # A regular expression may match a whole text, or the empty text before and after any character.
            return _Effect(1.0 + 2.0 * _bytes(content), merged=math.inf)
        return _Effect(
            max(1.0, _bytes(content) / _bytes(wanted)),
            merged=float(math.ceil(len(wanted) / len(content))) if content else math.inf,
        )

    def _precompiled(self, charsmap: str) -> _Effect:
        """Reads SentencePiece's table: the size of a trie, the trie, and its replacement texts, which end in zeros."""
        try:
            table = base64.b64decode(charsmap, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self._malformed(
                f"its precompiled_charsmap is not base64: {clip(error)}"
            ) from None
        end = 4 + int.from_bytes(table[:4], "little")
        if end > len(table):
            raise self._malformed(f"its precompiled_charsmap of {len(table)} bytes is cut off")
        return _Effect(float(max(1, *map(len, table[end:].split(b"\0")))), merged=math.inf)

    def _template(self, found: _Tree) -> _Effect:
        special = found.get("special_tokens")
        copies = added = 0
        for piece in self._list(found.get("single"), "post_processor"):
            if not isinstance(piece, Mapping):
                raise self._malformed("its post_processor is no template")
            name = piece.get("SpecialToken")
            if not isinstance(name, Mapping):
                copies += 1
                continue
            token = special.get(str(name.get("id"))) if isinstance(special, Mapping) else None
            ids = token.get("ids") if isinstance(token, Mapping) else None
            added += len(ids) if isinstance(ids, list) else 0
        return _Effect(float(max(1, copies)), float(added), 1.0 if copies else math.inf)

    def _text(self, found: _Tree, key: str) -> str:
        text = found.get(key)
        if not isinstance(text, str):
            raise self._malformed(f"its {found.get('type')} has no text as {key}")
        return text

    def _list(self, found: object, kind: str) -> list[object]:
        if not isinstance(found, list):
            raise self._malformed(f"its {kind} holds no list")
        return found

    def _malformed(self, reason: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._where} is malformed: {reason}")


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _characters(
    tree: _Tree, pieces: Sequence[str], added: Sequence[_Tree], normalizer: _Effect, merged: float
) -> float:
    """Returns the most characters of a text that one token stands for.

    The result is infinite if a component drops characters or a token stands for unknown text of any length.
    """
    # In normalized text, a space may stand for several other characters.
    swallows = any(
        token.get("normalized") and (token.get("lstrip") or token.get("rstrip")) for token in added
    )
    if math.isinf(merged) or swallows or not _covers_all_text(tree, set(pieces)):
        return math.inf
    longest = float(max(map(len, pieces), default=0))
    for token in added:
        content = str(token["content"])
        # A normalized added token is matched in the normalized text, where it may be longer.
        grown = _bytes(content) * normalizer.growth
        longest = max(longest, len(content), grown if token.get("normalized") else 0.0)
    return merged * longest if longest else math.inf


def _covers_all_text(tree: _Tree, pieces: set[str]) -> bool:
    """Whether every character of any text is encoded as part of a token with that text, or as bytes."""
    model = tree.get("model")
    if not isinstance(model, Mapping):
        return False
    has_bytes = all(f"<0x{byte:02X}>" in pieces for byte in range(256))
    if model.get("byte_fallback") and has_bytes:
        return True
    if (
        "merges" not in model
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    ):
        return False
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    altering = [
        name
        for name in _pre_tokenizers(tree.get("pre_tokenizer"))
        if name in ("ByteLevel", "Metaspace")
    ]
    return altering[-1:] == ["ByteLevel"] and pieces.issuperset(alphabet)


def _pre_tokenizers(found: object) -> Iterator[object]:
    """Yields the types of a pre-tokenizer's components in order."""
    if not isinstance(found, Mapping):
        return
    parts = found.get("pretokenizers")
    if isinstance(parts, list):
        for part in parts:
            yield from _pre_tokenizers(part)
    else:
        yield found.get("type")
