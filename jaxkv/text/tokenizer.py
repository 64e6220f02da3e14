"""Text to token ids and back, from a model directory's tokenizer.json. Never runs the directory's code."""

import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

import tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.text.chat_template import ChatTemplate, read_templates
from jaxkv.text.tokenizer_bounds import TextBounds, read_bounds
from jaxkv.weights.directory import (
    clip,
    existing_directory,
    has_file,
    parse_json_object,
    read_json_if_there,
    read_text,
)

MAX_TOKENIZER_BYTES = 128 * 2**20
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_BYTE_PIECE = re.compile(r"<0x..>")


class _ReportedAs:
    """A context that turns the library's errors into ours; it raises `Exception` itself, or what Rust panics become."""

    def __init__(self, error_class: type[ValueError], prefix: str) -> None:
        self._error_class = error_class
        self._prefix = prefix

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise self._error_class(f"{self._prefix}: {clip(error)}") from None


_ENCODING = _ReportedAs(ValueError, "the tokenizer cannot encode the text")
_DECODING = _ReportedAs(ValueError, "the tokenizer cannot decode the ids")


class Tokenizer:
    """A tokenizer.json with the ids that mean something to generation.

    Attributes:
        eos_ids: ids that end a text.
        bos_id: id that begins a text, if one is named.
        num_ids: ids lie below it; those that only the model's logits have stand for no text.
        chat_template: renders messages, if the directory has a template.

    Args:
        library: encodes and decodes.
        eos_ids, bos_id, chat_template: see above.
        model_vocab_size: ids that the model's logits have.
        bounds: refuses texts that are too long; `None` refuses none.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        model_vocab_size: int = 0,
        chat_template: ChatTemplate | None = None,
        bounds: TextBounds | None = None,
    ) -> None:
        self._library = library
        self._bounds = bounds
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.num_ids = max(model_vocab_size, 1 + max(library.get_vocab().values(), default=-1))
        self.chat_template = chat_template
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)

    def encode(
        self, text: str, *, add_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: names of special tokens in it are understood as such.
            add_special: let tokenizer.json's post-processor add what it adds, such as a BOS.
            max_tokens: refuse a text that is sure to have more ids, before the work of finding them; a text with
                more ids that is not sure to have them is encoded.

        Raises:
            ValueError: the text is sure to be too long, or holds half of a surrogate pair, which has no UTF-8.
        """
        if self._bounds is not None and max_tokens is not None:
            least = self._bounds.least_tokens(text)
            if least > max_tokens:
                raise ValueError(
                    f"a text of {len(text)} characters has at least {least} tokens, but at most {max_tokens} fit; "
                    f"shorten it or raise max_model_len"
                )
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            shown = hex(ord(text[error.start]))
            raise ValueError(
                f"the text holds the lone surrogate {shown} at index {error.start}; it is no valid Unicode"
            ) from None
        with _ENCODING:
            if self._bounds is not None:
                self._bounds.check_growth(content, self._library)
            return self._library.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids.

        Args:
            ids: token ids in [0, `num_ids`).
            skip_special_tokens: special tokens add no text; otherwise they add their names.

        Raises:
            ValueError: an id is outside the model's range, or the tokenizer's decoder fails on them.
        """
        checked = [self._checked(token) for token in ids]
        with _DECODING:
            return self._library.decode(checked, skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation; `ChatTemplate.render` and `encode` describe the arguments.

        Nothing is added to what the template writes: a BOS is the template's business.
        """
        if self.chat_template is None:
            raise ValueError("the model directory has no chat template; use generate with a prompt")
        text = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        return self.encode(text, add_special=False, max_tokens=max_tokens)

    def is_special(self, token: int) -> bool:
        """Whether an id is a special token, such as the mark of an end or of a turn."""
        return self._checked(token) in self._special

    def is_silent(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether an id adds no text: it is special and those are skipped, or only the model's logits have it."""
        skipped = skip_special_tokens and self.is_special(token)
        return skipped or self._library.id_to_token(self._checked(token)) is None

    def is_byte(self, token: int) -> bool:
        """Whether an id is a byte that is decoded along with the bytes next to it (`<0x0A>`)."""
        piece = self._library.id_to_token(token)
        if piece is None or not _BYTE_PIECE.fullmatch(piece):
            return False
        # Without byte fallback the piece is a text like any other.
        return self.decode([token], skip_special_tokens=False) != piece

    def _checked(self, token: int) -> int:
        token = operator.index(token)
        if not 0 <= token < self.num_ids:
            raise ValueError(f"token id {token} is outside the model's [0, {self.num_ids})")
        return token


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """Reads the tokenizer of a model directory; `None` if it has no tokenizer.json.

    The end and begin ids are those of the first file that names any: generation_config.json, then
    config.json, then tokenizer_config.json.

    Raises:
        BadCheckpoint: one line that names the file and what is wrong with it.
    """
    folder = existing_directory(directory)
    if not has_file(folder, "tokenizer.json"):
        return None
    library, bounds = _read_library(folder)
    generation = read_json_if_there(folder, "generation_config.json")
    config = read_json_if_there(folder, "config.json")
    settings = read_json_if_there(folder, "tokenizer_config.json")
    where = folder / "tokenizer_config.json"
    special = {name: _content(settings.get(name), name, where) for name in _NAMED_TOKENS}
    named = {name: text for name, text in special.items() if text is not None}
    sources = ((folder / "generation_config.json", generation), (folder / "config.json", config))
    ids = {
        kind: next((found for path, values in sources if (found := _ids(values, kind, path))), ())
        or _id_of(library, named.get(f"{kind}_token"))
        for kind in ("eos", "bos")
    }
    templates = read_templates(folder, settings)
    vocab_size = config.get("vocab_size")
    return Tokenizer(
        library,
        eos_ids=ids["eos"],
        bos_id=ids["bos"][0] if ids["bos"] else None,
        model_vocab_size=vocab_size if _is_id(vocab_size) else 0,
        chat_template=ChatTemplate(templates, named) if templates else None,
        bounds=bounds,
    )


def _read_library(folder: Path) -> tuple[tokenizers.Tokenizer, TextBounds]:
    """Reads tokenizer.json twice: here, to bound what it can do to texts, and in the library, which has no bounds."""
    where = f"{folder / 'tokenizer.json'}"
    text = read_text(folder, "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
    bounds = read_bounds(parse_json_object(text, where), where)
    with _ReportedAs(BadCheckpoint, f"{where} is malformed"):
        library = tokenizers.Tokenizer.from_str(text)
        # Some files carry the truncation and padding of their training.
        library.no_truncation()
        library.no_padding()
        # Some mistakes, such as a post-processor that adds a token nobody defined, show only in use.
        added = library.encode("").ids
    nameless = [token for token in added if library.id_to_token(token) is None]
    if nameless:
        raise BadCheckpoint(f"{where} adds the unknown id {nameless[0]} to texts")
    return library, bounds


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _ids(values: Mapping[str, object], kind: str, path: Path) -> tuple[int, ...]:
    """Returns `eos_token_id` or `bos_token_id`, which may be one id, several or null."""
    found = values.get(f"{kind}_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    known = tuple(token for token in ids if _is_id(token))
    if len(known) < len(ids):
        raise BadCheckpoint(f"{path}: {kind}_token_id is no token id: {clip(repr(found), 60)}")
    return known


def _id_of(library: tokenizers.Tokenizer, text: str | None) -> tuple[int, ...]:
    token = None if text is None else library.token_to_id(text)
    return () if token is None else (token,)


def _content(value: object, name: str, path: Path) -> str | None:
    """Returns the text of a special token, which is text or an object with a "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BadCheckpoint(f"{path}: {name} is neither text nor has it a content")
    return value
