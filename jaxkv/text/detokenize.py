"""Detokenisation of generated ids after their prompt: all at once, or incrementally without broken characters."""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from jaxkv.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most 3 bytes, so at most 3 tokens. More context does not change later text.
_MAX_WINDOW = 64
_CONTEXT = 16


class _Token(NamedTuple):
    """Properties of a token id.

    Attributes:
        silent: it adds no text.
        byte: it is one byte of a character, decoded together with adjacent bytes.
        alone: its text when decoded alone.
    """

    silent: bool
    byte: bool
    alone: str


class _Tokens:
    """A cache of `_Token` per id of one tokenizer."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._by_id: dict[int, _Token] = {}
        self._skip = skip_special_tokens

    def of(self, tokenizer: Tokenizer, token_id: int) -> _Token:
        token = self._by_id.get(token_id)
        if token is None:
            silent = tokenizer.is_silent(token_id, skip_special_tokens=self._skip)
            alone = "" if silent else tokenizer.decode([token_id], skip_special_tokens=self._skip)
            token = _Token(silent, not silent and tokenizer.is_byte(token_id), alone)
            self._by_id[token_id] = token
        return token


_TOKENS: WeakKeyDictionary[Tokenizer, tuple[_Tokens, _Tokens]] = WeakKeyDictionary()
"""Tokenizer -> its cached tokens, without and with `skip_special_tokens`."""


def _tokens_of(tokenizer: Tokenizer, skip_special_tokens: bool) -> _Tokens:
    return _TOKENS.setdefault(tokenizer, (_Tokens(False), _Tokens(True)))[skip_special_tokens]


def text_after(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Returns the text that generated ids add to the text of their prompt.

    The ids are decoded together with the end of the prompt, because SentencePiece decoders strip the space before the
    first word of a text. A special token at the end of the prompt begins a new text. A character that the prompt leaves
    incomplete belongs to the added text.

    Args:
        tokenizer: the tokenizer.
        prompt: ids of the prompt; may be empty.
        ids: generated ids.
        skip_special_tokens: special tokens among `ids` add no text.

    Raises:
        ValueError: an id of `ids` is outside the model's range, or the decoder fails.
    """
    context = _context(tokenizer, prompt)
    before = tokenizer.decode(context)
    text = tokenizer.decode([*context, *ids], skip_special_tokens=skip_special_tokens)
    return text[_shared(before, text) :]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Returns the last ids of a prompt, as the context of the text after it.

    The context begins after the last special token, contains a token with text if there is one, and does not begin
    inside a run of byte tokens, which can only be decoded as a whole.
    """
    tokens = _tokens_of(tokenizer, skip_special_tokens=True)
    context: list[int] = []
    has_text = False
    for token_id in reversed(prompt):
        if token_id >= tokenizer.num_ids:
            continue
        token = tokens.of(tokenizer, token_id)
        if token.silent and tokenizer.is_special(token_id):
            break
        if token.silent:
            continue
        context.append(token_id)
        has_text = has_text or bool(token.alone)
        if has_text and len(context) >= _CONTEXT and not token.byte:
            break
    return context[::-1]


def _shared(before: str, text: str) -> int:
    """Returns the length of the common prefix of two texts, in characters."""
    if text.startswith(before):
        return len(before)
    pairs = enumerate(zip(before, text, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(before), len(text)))


class Detokenizer:
    """Decodes one sequence incrementally, into pieces of text whose concatenation is `text_after` of all ids.

    The latest tokens are decoded again together with each new one, because the text of a token depends on its
    neighbours: a character may span several tokens, and the first token of a text may lose its leading space.

    Args:
        tokenizer: the tokenizer.
        prompt: ids before the sequence.
        skip_special_tokens: special tokens among the pushed ids add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens = _tokens_of(tokenizer, skip_special_tokens)
        self._window = _context(tokenizer, prompt)
        # The prompt's part of the window's text; empty once text after the prompt was returned.
        self._before = self._decode(self._window)
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that has become final: often the token's own, sometimes none.

        Raises:
            ValueError: the id is outside the model's range; the state is unchanged.
        """
        token = self._tokens.of(self._tokenizer, token_id)
        if token.silent:
            return ""
        self._window.append(token_id)
        if token.byte:
            # A run of byte tokens is decoded as a whole, because one more byte can make all of it invalid.
            return ""
        text = self._decode(self._window)
        final = text[:-1] if text.endswith(REPLACEMENT) else text
        if self._before:
            self._skip_prompt(final, is_whole=final == text)
        piece = final[self._shown :]
        self._shown = max(self._shown, len(final))
        if final == text and token.alone:
            self._window, self._shown = [token_id], len(token.alone)
        else:
            self._shorten(is_whole=final == text)
        return piece

    def finish(self) -> str:
        """Returns the remaining text, with U+FFFD for broken characters. Call it once, at the end."""
        text = self._decode(self._window)
        self._skip_prompt(text, is_whole=True)
        piece = text[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _skip_prompt(self, final: str, *, is_whole: bool) -> None:
        """Counts the prompt's part of the window's text as returned already."""
        self._shown = max(self._shown, _shared(self._before, final))
        if is_whole or self._shown < len(final):
            self._before = ""

    def _shorten(self, *, is_whole: bool) -> None:
        """Drops the window's first tokens, and keeps enough context to decode the next token.

        The kept tokens must have text by themselves, because decoders may change the start of a text.
        """
        withheld = 0 if is_whole else 1
        if is_whole:
            start = len(self._window) - 1
        elif len(self._window) > _MAX_WINDOW:
            start = len(self._window) - _CONTEXT
        else:
            return
        kept = self._decode(self._window[start:])
        while start > 0 and len(kept) <= withheld:
            start -= 1
            kept = self._decode(self._window[start:])
        self._window = self._window[start:]
        self._shown = len(kept) - withheld
        self._before = ""
