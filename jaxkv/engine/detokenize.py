"""Token ids to text as they come, never showing half a character. Knows no requests and no stop conditions."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from jaxkv.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Half a character is at most 3 bytes, so at most 3 tokens; a longer context changes nothing, only its start.
_LONGEST_WINDOW = 64
_CONTEXT = 16


class _Token(NamedTuple):
    """What is true of an id wherever it stands: it adds no text; it is one of several bytes; its text when alone."""

    silent: bool
    byte: bool
    alone: str


_TOKENS: WeakKeyDictionary[Tokenizer, dict[int, _Token]] = WeakKeyDictionary()
"""Asked of a tokenizer once: most texts are made of few ids, and a step of many rows asks for all of them."""


class Detokenizer:
    """Turns one sequence's ids into pieces of text whose concatenation is `tokenizer.decode` of all ids.

    A few tokens before the newest ones are decoded again with them, because what a token says depends on its
    neighbours: characters may be spread over tokens, and the first token of a text may lose its leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = _TOKENS.setdefault(tokenizer, {})
        self._window: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Returns the text that is certain now and was not before; often that of `token_id`, sometimes none.

        Raises:
            ValueError: the id is none of the model's; the text so far stays as it was.
        """
        token = self._tokens.get(token_id) or self._look_up(token_id)
        if token.silent:
            return ""
        self._window.append(token_id)
        if token.byte:
            # A run of bytes is text only as a whole: one more byte can make all of it invalid.
            return ""
        text = self._tokenizer.decode(self._window)
        certain = text[:-1] if text.endswith(REPLACEMENT) else text
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if certain == text and token.alone:
            self._window, self._shown = [token_id], len(token.alone)
        else:
            self._shorten(is_whole=certain == text)
        return piece

    def finish(self) -> str:
        """Returns what was held back; broken characters come out as U+FFFD. Call it once, at the end."""
        piece = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _look_up(self, token_id: int) -> _Token:
        silent = self._tokenizer.is_silent(token_id)
        alone = "" if silent else self._tokenizer.decode([token_id])
        token = _Token(silent, not silent and self._tokenizer.is_byte(token_id), alone)
        self._tokens[token_id] = token
        return token

    def _shorten(self, *, is_whole: bool) -> None:
        """Forgets tokens that can no longer matter, keeping enough for the next one to be decoded in context.

        What is kept must say something by itself: then whatever happens to the start of a text happens within it.
        """
        held = 0 if is_whole else 1
        if is_whole:
            start = len(self._window) - 1
        elif len(self._window) > _LONGEST_WINDOW:
            start = len(self._window) - _CONTEXT
        else:
            return
        kept = self._tokenizer.decode(self._window[start:])
        while start > 0 and len(kept) <= held:
            start -= 1
            kept = self._tokenizer.decode(self._window[start:])
        self._window = self._window[start:]
        self._shown = len(kept) - held
