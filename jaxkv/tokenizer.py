"""Text to token ids and back, from a model directory's tokenizer.json. Never runs the directory's code."""

import contextlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import tokenizers

from jaxkv.chat_template import ChatTemplate, read_templates
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.directory import (
    clip,
    existing_directory,
    has_file,
    path_inside,
    read_json_if_there,
)

MAX_TOKENIZER_BYTES = 256 * 2**20
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


class Tokenizer:
    """A tokenizer.json with the ids that mean something to generation.

    Attributes:
        eos_ids: ids that end a text.
        bos_id: id that begins a text, if one is named.
        num_ids: ids lie below it; those that only the model's logits have stand for no text.
        chat_template: renders messages, if the directory has a template.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        model_vocab_size: int = 0,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # Some files carry the truncation and padding of their training.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.num_ids = max(model_vocab_size, 1 + max(library.get_vocab().values(), default=-1))
        self.chat_template = chat_template
        added = library.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: names of special tokens in it are understood as such.
            add_special: let tokenizer.json's post-processor add what it adds, such as a BOS.

        Raises:
            ValueError: the text holds half of a surrogate pair, which has no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = hex(ord(text[error.start]))
            raise ValueError(
                f"the text holds the lone surrogate {shown} at index {error.start}; it is no valid Unicode"
            ) from None
        with _reported_as(ValueError, "the tokenizer cannot encode the text"):
            return self._library.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; special tokens have none.

        Raises:
            ValueError: an id is none of this model's.
        """
        return self._library.decode(
            [self._checked(token) for token in ids], skip_special_tokens=True
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation; `ChatTemplate.render` says what the arguments mean.

        Nothing is added to what the template writes: a BOS is the template's business.
        """
        if self.chat_template is None:
            raise ValueError("the model directory has no chat template; use generate with a prompt")
        text = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        return self.encode(text, add_special=False)

    def is_silent(self, token: int) -> bool:
        """Whether an id never adds text: special tokens, and ids that only the model's logits have."""
        return self._checked(token) in self._special or self._library.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether an id is a byte that is decoded along with the bytes next to it (`<0x0A>`)."""
        piece = self._library.id_to_token(token)
        if piece is None or not _BYTE_PIECE.fullmatch(piece):
            return False
        # Without byte fallback the piece is a text like any other.
        return self._library.decode([token], skip_special_tokens=False) != piece

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
    library = _read_library(folder)
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
    )


def _read_library(folder: Path) -> tokenizers.Tokenizer:
    path = path_inside(folder, "tokenizer.json")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise BadCheckpoint(f"{folder / 'tokenizer.json'} exceeds {MAX_TOKENIZER_BYTES} bytes")
    with _reported_as(BadCheckpoint, f"{folder / 'tokenizer.json'} is malformed"):
        library = tokenizers.Tokenizer.from_file(str(path))
        # Some mistakes, such as a post-processor that adds a token nobody defined, show only in use.
        added = library.encode("").ids
    nameless = [token for token in added if library.id_to_token(token) is None]
    if nameless:
        raise BadCheckpoint(
            f"{folder / 'tokenizer.json'} adds the unknown id {nameless[0]} to texts"
        )
    return library


@contextlib.contextmanager
def _reported_as(error_class: type[ValueError], prefix: str) -> Iterator[None]:
    """Turns the library's errors into ours; it raises `Exception` itself, or what Rust panics become."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise error_class(f"{prefix}: {clip(error)}") from None


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
