"""`Tokenizer`, read from a model directory's tokenizer.json. Code in the directory is never executed."""

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
    """A context manager that converts the library's errors: bare `Exception`s and Rust panics."""

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
    """Encodes and decodes text, with the special ids of generation.

    Attributes:
        eos_ids: ids that end a sequence.
        bos_id: id that begins a text; `None` if there is none.
        num_ids: upper bound of all ids, exclusive. Ids that only the model's logits have stand for no text.
        chat_template: the model's chat template; `None` if there is none.

    Args:
        library: the tokenizer of the `tokenizers` library.
        eos_ids, bos_id, chat_template: see above.
        model_vocab_size: number of the model's logits.
        bounds: bounds on lengths, by which too long texts are rejected; `None` rejects none.
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
            text: the text. Names of special tokens in it become these tokens.
            add_special: whether tokenizer.json's post-processor adds its special tokens, such as a BOS.
            max_tokens: reject a text that certainly has more ids before it is encoded. Other texts are encoded, even if
                they turn out to have more.

        Raises:
            ValueError: the text is certainly too long, or contains a lone surrogate, which has no UTF-8.
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
                f"the text holds the lone surrogate {shown} at index {error.start}, which is no valid Unicode; "
                f"remove it"
            ) from None
        with _ENCODING:
            if self._bounds is not None:
                self._bounds.check_growth(content, self._library)
            return self._library.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids.

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
        """Returns the ids of a conversation. `ChatTemplate.render` and `encode` document the arguments.

        No special token is added: the template writes its own BOS.

        Raises:
            ValueError: there is no chat template, or see `ChatTemplate.render` and `encode`.
        """
        if self.chat_template is None:
            raise ValueError("the model directory has no chat template; use generate with a prompt")
        text = self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        return self.encode(text, add_special=False, max_tokens=max_tokens)

    def is_special(self, token: int) -> bool:
        """Whether an id is a special token, such as the end of a text or of a turn."""
        return self._checked(token) in self._special

    def is_silent(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether an id adds no text: a special token that is skipped, or an id that only the model's logits have."""
        skipped = skip_special_tokens and self.is_special(token)
        return skipped or self._library.id_to_token(self._checked(token)) is None

    def is_byte(self, token: int) -> bool:
        """Whether an id is one byte, such as `<0x0A>`, that is decoded together with adjacent bytes."""
        piece = self._library.id_to_token(token)
        if piece is None or not _BYTE_PIECE.fullmatch(piece):
            return False
        # Without byte fallback, the piece is ordinary text.
        return self.decode([token], skip_special_tokens=False) != piece

    def _checked(self, token: int) -> int:
        token = operator.index(token)
        if not 0 <= token < self.num_ids:
            raise ValueError(f"token id {token} is outside the model's [0, {self.num_ids})")
        return token


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """Reads the tokenizer of a model directory; returns `None` if it has no tokenizer.json.

    EOS and BOS ids come from the first file that has any: generation_config.json, config.json,
    tokenizer_config.json.

    Raises:
        BadCheckpoint: a file is malformed; the message names the file and the reason in one line.
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
    """Returns the library's tokenizer and our bounds on its texts, both read from tokenizer.json."""
    where = f"{folder / 'tokenizer.json'}"
    text = read_text(folder, "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
    bounds = read_bounds(parse_json_object(text, where), where)
    with _ReportedAs(BadCheckpoint, f"{where} is malformed"):
        library = tokenizers.Tokenizer.from_str(text)
        # Some files still have the truncation and padding of training.
        library.no_truncation()
        library.no_padding()
        # Some errors, such as a post-processor that adds an undefined token, appear only in use.
        added = library.encode("").ids
    nameless = [token for token in added if library.id_to_token(token) is None]
    if nameless:
        raise BadCheckpoint(f"{where} adds the unknown id {nameless[0]} to texts")
    return library, bounds


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _ids(values: Mapping[str, object], kind: str, path: Path) -> tuple[int, ...]:
    """Returns the ids of `eos_token_id` or `bos_token_id`, which may be one id, a list or null."""
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
    """Returns the text of a special token, given as text or as an object with a "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise BadCheckpoint(f'{path}: {name} is neither text nor an object with a "content" text')
    return value
