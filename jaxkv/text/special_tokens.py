"""Special and added tokens that the files beside tokenizer.json name, by Transformers' rules.

`tokenizer_config.json` names special tokens (`bos_token`) and lists added tokens (`added_tokens_decoder`), perhaps more
or others than tokenizer.json. Older directories have `special_tokens_map.json` and `added_tokens.json` instead, which
are read only if `added_tokens_decoder` is absent.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.directory import read_json_if_there
from jaxkv.wording import clip, listed, shown

_LOG = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
_STANDARD = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files beside tokenizer.json name.

    Attributes:
        named: name -> text, such as "bos_token" -> "<s>"; chat templates see them as variables.
        others: texts of further special tokens.
        added: id -> token of the lists of added tokens, by id.
    """

    named: Mapping[str, str]
    others: Sequence[str]
    added: Mapping[int, tokenizers.AddedToken]

    def missing_from(
        self, library: tokenizers.Tokenizer, vocab_size: int
    ) -> list[tokenizers.AddedToken]:
        """Returns the tokens to add to a tokenizer, in their order.

        A token that differs from tokenizer.json's in its flags replaces it. A token that the tokenizer would give
        another id than the list does is left out, with a warning. A special token that has no id yet is added only if
        the model has a logit for it.

        Args:
            library: the tokenizer as tokenizer.json has it.
            vocab_size: number of the model's logits.
        """
        known = library.get_added_tokens_decoder()
        contents = {token.content for token in known.values()}
        same = {repr(token) for token in known.values()}
        vocab = library.get_vocab(with_added_tokens=True)
        size = library.get_vocab_size(with_added_tokens=False)
        free = max(size, 1 + max(known, default=-1))
        taken = set(vocab.values())
        made: list[tokenizers.AddedToken] = []
        misplaced = []
        named = {*self.named.values()}
        for index, listed_token in self.added.items():
            token = _as_special(listed_token) if listed_token.content in named else listed_token
            if repr(token) in same:
                continue
            if token.content not in vocab:
                if index != free or free in taken:
                    misplaced.append(f"{clip(token.content, 40)} ({index})")
                    continue
                free += 1
            made.append(token)
            contents.add(token.content)
        listed_texts = {token.content for token in self.added.values()}
        made += [
            _as_special(token)
            for token in known.values()
            if token.content in named - listed_texts and not token.special
        ]
        for text in dict.fromkeys((*self.named.values(), *self.others)):
            if not text or text in contents:
                continue
            if text not in vocab:
                if free >= vocab_size or free in taken:
                    continue
                free += 1
            made.append(tokenizers.AddedToken(text, special=True, normalized=False))
            contents.add(text)
        if misplaced:
            _LOG.warning(
                "%s lists tokens with ids that tokenizer.json has no place for; their names in a text are plain "
                "text: %s",
                _CONFIG,
                listed(misplaced),
            )
        return made


def _as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """Returns a token that has a name such as "eos_token", and is special even if a list says otherwise."""
    flags = {flag: getattr(token, flag) for flag in _FLAGS if flag != "special"}
    return tokenizers.AddedToken(token.content, **flags, special=True)


def read_special_tokens(folder: Path, settings: Mapping[str, object]) -> SpecialTokens:
    """Reads the special and added tokens of a model directory.

    Args:
        folder: the model directory.
        settings: its tokenizer_config.json; empty if there is none.

    Raises:
        BadCheckpoint: a file is malformed.
    """
    where = folder / _CONFIG
    if "added_tokens_decoder" in settings:
        added = _read_decoder(settings["added_tokens_decoder"], where)
        return SpecialTokens(*_read_names(settings, where), added)
    older = read_json_if_there(folder, "special_tokens_map.json")
    named, others = _read_names({**settings, **older}, where)
    special = {*named.values(), *others}
    encoder = read_json_if_there(folder, "added_tokens.json")
    pairs = sorted(
        (_checked_id(index, folder / "added_tokens.json"), text) for text, index in encoder.items()
    )
    added = {
        index: tokenizers.AddedToken(text, normalized=text not in special, special=text in special)
        for index, text in pairs
    }
    return SpecialTokens(named, others, added)


def _read_names(
    settings: Mapping[str, object], where: Path
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns name -> text of special tokens, and the texts of those without a name."""
    named = {name: _content(settings.get(name), name, where) for name in _STANDARD}
    for name, value in settings.items():
        if name.endswith("_token") and name not in named and isinstance(value, str):
            named[name] = value
    others: list[str] = []
    for key in _EXTRA:
        found = settings.get(key)
        if isinstance(found, Mapping):
            named |= {str(name): _content(value, key, where) for name, value in found.items()}
            break
        if found is not None:
            if not isinstance(found, list):
                raise BadCheckpoint(f"{where}: {key} is neither a list nor an object of tokens")
            others = [text for each in found if (text := _content(each, key, where)) is not None]
            break
    return {name: text for name, text in named.items() if text is not None}, tuple(others)


def _read_decoder(found: object, where: Path) -> dict[int, tokenizers.AddedToken]:
    if not isinstance(found, Mapping):
        raise BadCheckpoint(f"{where}: added_tokens_decoder is no JSON object")
    return dict(sorted(_decoded(found, where)))


def _decoded(
    found: Mapping[str, object], where: Path
) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    for index, token in found.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not isinstance(content, str) or not isinstance(token, Mapping):
            raise BadCheckpoint(
                f"{where}: added_tokens_decoder[{clip(repr(index), 20)}] is no object with a content"
            )
        flags = {flag: token[flag] for flag in _FLAGS if flag in token}
        wrong = [flag for flag, value in flags.items() if not isinstance(value, bool)]
        if wrong:
            raise BadCheckpoint(
                f"{where}: {wrong[0]} of added_tokens_decoder[{clip(repr(index), 20)}] is {shown(flags[wrong[0]])}, "
                f"wanted true or false"
            )
        number = int(index) if re.fullmatch("[0-9]{1,10}", index) else index
        yield _checked_id(number, where), tokenizers.AddedToken(content, **flags)


def _checked_id(value: object, where: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise BadCheckpoint(f"{where} has {shown(value)} in the place of a token id")
    return value


def _content(value: object, name: str, where: Path) -> str | None:
    """Returns the text of a special token, given as text or as an object with a "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BadCheckpoint(f'{where}: {name} is neither text nor an object with a "content" text')
    return value
