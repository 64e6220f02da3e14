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
from jaxkv.text.chat_template import ChatOptions, ChatTemplate, read_templates
from jaxkv.text.conversion import convert, published_form
from jaxkv.text.special_tokens import SpecialTokens, read_special_tokens
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
_BYTE_PIECE = re.compile(r"<0x..>")

NO_TOKENIZER = (
    "this model directory has no tokenizer: neither tokenizer.json nor another form such as tokenizer.model; copy the "
    "model's tokenizer.json and tokenizer_config.json into it"
)
"""Beginning of the error for a text prompt without a tokenizer."""


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
        num_ids: upper bound of all ids, exclusive. Ids that only the model's logits have stand for no text.
        chat_template: the model's chat template; `None` if there is none.
        special_tokens: name -> text of special tokens, such as "bos_token" -> "<s>".

    Args:
        library: the tokenizer of the `tokenizers` library.
        eos_ids, chat_template, special_tokens: see above.
        model_vocab_size: number of the model's logits.
        bounds: bounds on lengths, by which too long texts are rejected; `None` rejects none.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        model_vocab_size: int = 0,
        chat_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
        bounds: TextBounds | None = None,
    ) -> None:
        self._library = library
        self._bounds = bounds
        self.eos_ids = eos_ids
        self.num_ids = max(model_vocab_size, 1 + max(library.get_vocab().values(), default=-1))
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
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
        options: ChatOptions | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation. `ChatTemplate.render` and `encode` document the arguments.

        No special token is added: the template writes its own BOS.

        Raises:
            ValueError: there is no chat template, or see `ChatTemplate.render` and `encode`.
        """
        template = self.chat_template
        if template is None and options is not None and options.chat_template is not None:
            # Made anew for each call: a model without a template has no worker to keep.
            template = ChatTemplate({}, self.special_tokens)
        if template is None:
            raise ValueError(
                "the model directory has no chat template; use generate with a prompt, or give chat_template"
            )
        return self.encode(
            template.render(messages, options), add_special=False, max_tokens=max_tokens
        )

    @property
    def token_ids(self) -> frozenset[int]:
        """Ids that have a token; the model's logits may have more."""
        return frozenset(self._library.get_vocab().values())

    def to_json(self) -> str:
        """Returns the text of a tokenizer.json."""
        return self._library.to_str()

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

    def special_texts(self) -> tuple[str, ...]:
        """Returns the names of all special tokens."""
        return tuple(
            piece for token in sorted(self._special) if (piece := self.piece(token)) is not None
        )

    def piece(self, token: int) -> str | None:
        """Returns the name of an id in tokenizer.json; `None` if only the model's logits have it."""
        return self._library.id_to_token(self._checked(token))

    def id_of(self, piece: str) -> int | None:
        """Returns the id of a name in tokenizer.json; `None` if there is none."""
        return self._library.token_to_id(piece)

    def _checked(self, token: int) -> int:
        token = operator.index(token)
        if not 0 <= token < self.num_ids:
            raise ValueError(f"token id {token} is outside the model's [0, {self.num_ids})")
        return token


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """Reads the tokenizer of a model directory; returns `None` if it has none.

    A tokenizer in another form than tokenizer.json, such as SentencePiece's, is converted with Transformers. EOS and
    BOS ids come from the first file that has any: generation_config.json, config.json, tokenizer_config.json.

    Raises:
        BadCheckpoint: a file is malformed, or cannot be converted; the message names the file and the reason in one
            line.
    """
    folder = existing_directory(directory)
    settings = read_json_if_there(folder, "tokenizer_config.json")
    if has_file(folder, "tokenizer.json"):
        text = read_text(folder, "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
        return _load(folder, text, f"{folder / 'tokenizer.json'}", settings)
    form = published_form(folder)
    if not form:
        return None
    text, settings = convert(folder, form, settings)
    return _load(folder, text, f"the tokenizer.json made of {folder / form[0]}", settings)


def _load(folder: Path, text: str, where: str, settings: Mapping[str, object]) -> Tokenizer:
    """Returns the tokenizer of a model directory.

    Args:
        folder: the model directory.
        text: its tokenizer.json.
        where: the name of that in messages.
        settings: its tokenizer_config.json.
    """
    generation = read_json_if_there(folder, "generation_config.json")
    config = read_json_if_there(folder, "config.json")
    vocab_size = _vocab_size(config)
    special = read_special_tokens(folder, settings)
    library, bounds = _read_library(text, where, special, vocab_size)
    library.encode_special_tokens = settings.get("split_special_tokens") is True
    sources = ((folder / "generation_config.json", generation), (folder / "config.json", config))
    # Those of "bos" are only checked: the post-processor has the id that it adds.
    ids = {
        kind: next((found for path, values in sources if (found := _ids(values, kind, path))), ())
        for kind in ("eos", "bos")
    }
    templates = read_templates(folder, settings)
    return Tokenizer(
        library,
        eos_ids=ids["eos"] or _id_of(library, special.named.get("eos_token")),
        model_vocab_size=vocab_size,
        chat_template=ChatTemplate(templates, special.named) if templates else None,
        special_tokens=special.named,
        bounds=bounds,
    )


def _read_library(
    text: str, where: str, special: SpecialTokens, vocab_size: int
) -> tuple[tokenizers.Tokenizer, TextBounds]:
    """Returns the library's tokenizer and our bounds on its texts, both read from the text of tokenizer.json."""
    tree = parse_json_object(text, where)
    bounds = read_bounds(tree, where)
    with _ReportedAs(BadCheckpoint, f"{where} is malformed"):
        library = tokenizers.Tokenizer.from_str(text)
        more = special.missing_from(library, vocab_size)
        if more:
            # Before they are added, since that normalizes them.
            bounds = read_bounds(_with_added(tree, more), where)
            library.add_tokens(more)
        # Some files still have the truncation and padding of training.
        library.no_truncation()
        library.no_padding()
        # Some errors, such as a post-processor that adds an undefined token, appear only in use.
        added = library.encode("").ids
    nameless = [token for token in added if library.id_to_token(token) is None]
    if nameless:
        raise BadCheckpoint(f"{where} adds the unknown id {nameless[0]} to texts")
    return library, bounds


def _with_added(
    tree: Mapping[str, object], more: Sequence[tokenizers.AddedToken]
) -> dict[str, object]:
    """Returns the JSON of a tokenizer with the lengths and flags of more added tokens, for their bounds."""
    known = tree.get("added_tokens")
    added = [
        {
            "content": token.content,
            "normalized": token.normalized,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
        }
        for token in more
    ]
    return {**tree, "added_tokens": [*(known if isinstance(known, list) else []), *added]}


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _vocab_size(config: Mapping[str, object]) -> int:
    """Returns the number of a model's logits, which multimodal models have in `text_config`; 0 if unknown."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        size = values.get("vocab_size")
        if _is_id(size):
            return size
    return 0


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
