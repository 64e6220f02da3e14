"""Generated ids to text, behind the text of their prompt: all at once, or piece by piece without broken characters."""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from jaxkv.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# An incomplete character is at most 3 bytes, so at most 3 tokens; a longer context changes nothing, only its start.
_LONGEST_WINDOW = 64
_CONTEXT = 16


class _Token(NamedTuple):
    """What is true of an id wherever it stands: it adds no text; it is one of several bytes; its text when alone."""

    silent: bool
    byte: bool
    alone: str


class _Tokens:
    """Looks up each id of a tokenizer once: most texts are made of few ids, and a step of many rows asks for all."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._known: dict[int, _Token] = {}
        self._skip = skip_special_tokens

    def of(self, tokenizer: Tokenizer, token_id: int) -> _Token:
        token = self._known.get(token_id)
        if token is None:
            silent = tokenizer.is_silent(token_id, skip_special_tokens=self._skip)
            alone = "" if silent else tokenizer.decode([token_id], skip_special_tokens=self._skip)
            token = _Token(silent, not silent and tokenizer.is_byte(token_id), alone)
            self._known[token_id] = token
        return token


_TOKENS: WeakKeyDictionary[Tokenizer, tuple[_Tokens, _Tokens]] = WeakKeyDictionary()
"""Per tokenizer: its ids where special tokens show, and where they are skipped."""


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

    The first generated token is decoded in its place behind the prompt, because decoders in the manner of
    SentencePiece strip the space in front of a text's first word. A special token at the end of the prompt begins a
    new text. A character that the prompt leaves incomplete is part of the added text.

    Args:
        tokenizer: turns ids to text.
        prompt: ids of the prompt; may be empty.
        ids: the generated ids.
        skip_special_tokens: special tokens among `ids` add no text.

    Raises:
        ValueError: an id of `ids` is outside the model's range, or the decoder fails.
    """
    context = _context(tokenizer, prompt)
    before = tokenizer.decode(context)
    text = tokenizer.decode([*context, *ids], skip_special_tokens=skip_special_tokens)
    return text[_shared(before, text) :]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Returns the last ids of a prompt that decide how the text behind it begins.

    They begin behind the last special token, hold a token with text if there is one, and do not begin within a run
    of bytes, which is text only as a whole.
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
    """Returns how many characters two texts have in common from their start."""
    if text.startswith(before):
        return len(before)
    pairs = enumerate(zip(before, text, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(before), len(text)))


class Detokenizer:
    """Turns one sequence's ids into pieces of text whose concatenation is `text_after` of all ids.

    A few tokens before the newest ones are decoded again with them, because the text of a token depends on its
    neighbours: characters may be spread over tokens, and the first token of a text may lose its leading space.

    Args:
        tokenizer: turns ids to text.
        prompt: ids that the sequence follows.
        skip_special_tokens: special tokens among the pushed ids add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens = _tokens_of(tokenizer, skip_special_tokens)
        self._window = _context(tokenizer, prompt)
        # The prompt's part of the window's text, until text is known that follows it.
        self._before = self._decode(self._window)
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Returns the text that is certain now and was not before; often that of `token_id`, sometimes none.

        Raises:
            ValueError: the id is outside the model's range; the text so far stays as it was.
        """
        token = self._tokens.of(self._tokenizer, token_id)
        if token.silent:
            return ""
        self._window.append(token_id)
        if token.byte:
            # A run of bytes is text only as a whole: one more byte can make all of it invalid.
            return ""
        text = self._decode(self._window)
        certain = text[:-1] if text.endswith(REPLACEMENT) else text
        if self._before:
            self._skip_prompt(certain, is_whole=certain == text)
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if certain == text and token.alone:
            self._window, self._shown = [token_id], len(token.alone)
        else:
            self._shorten(is_whole=certain == text)
        return piece

    def finish(self) -> str:
        """Returns what was held back; broken characters come out as U+FFFD. Call it once, at the end."""
        text = self._decode(self._window)
        self._skip_prompt(text, is_whole=True)
        piece = text[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _skip_prompt(self, certain: str, *, is_whole: bool) -> None:
        """Counts as shown what the window's text has of the prompt's text."""
        self._shown = max(self._shown, _shared(self._before, certain))
        if is_whole or self._shown < len(certain):
            self._before = ""

    def _shorten(self, *, is_whole: bool) -> None:
        """Drops tokens that can no longer matter, keeping enough for the next one to be decoded in context.

        The kept tokens must have text by themselves: then whatever happens to the start of a text happens within it.
        """
        held = 0 if is_whole else 1
        if is_whole:
            start = len(self._window) - 1
        elif len(self._window) > _LONGEST_WINDOW:
            start = len(self._window) - _CONTEXT
        else:
            return
        kept = self._decode(self._window[start:])
        while start > 0 and len(kept) <= held:
            start -= 1
            kept = self._decode(self._window[start:])
        self._window = self._window[start:]
        self._shown = len(kept) - held
        self._before = ""
