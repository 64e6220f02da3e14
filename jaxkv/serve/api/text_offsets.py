"""`TextOffsets`: where the characters of each token begin in a text."""

import codecs
from collections.abc import Sequence

from jaxkv.serve.token_texts import TokenTexts
from jaxkv.text.detokenize import REPLACEMENT, Detokenizer
from jaxkv.text.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")
_LONGEST = 4
"""Bytes of the longest character."""


class TextOffsets:
    """Counts the characters of a text that are complete before each of its tokens.

    A token that is a part of a character has the offset of the character. The bytes of the tokens tell which characters
    are complete. The detokenizer tells what the bytes do not, such as that a text loses its first space.

    Args:
        tokenizer: the tokenizer; without one there is no text, and all offsets are `start`.
        texts: the bytes of its tokens.
        prompt: ids before the tokens.
        skip_special_tokens: special tokens add no text.
        start: offset of the first character of the tokens, a part of which may be in the prompt.
        end: offset of the first character of the tokens if they do not complete the last one of the prompt.

    Attributes:
        position: number of complete characters, those before `start` included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        texts: TokenTexts,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool,
        start: int = 0,
        end: int = 0,
    ) -> None:
        self.position = start
        self._final = start
        self._apart = end - start
        self._tokenizer = tokenizer
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = _Decoder("replace")
        unfinished = unfinished_bytes(texts, prompt)
        self._decoder.decode(unfinished)
        self._prompt_is_open = bool(unfinished)
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer, prompt, skip_special_tokens=skip_special_tokens
        )

    def push(self, token: int) -> int:
        """Adds a token; returns where its characters begin.

        Raises:
            ValueError: the id is outside the model's range.
        """
        if self._tokenizer is None or self._detokenizer is None:
            return self.position
        self._final += len(self._detokenizer.push(token))
        if self._tokenizer.is_silent(token, skip_special_tokens=self._skip):
            return self.position
        text, data = self._texts.of(token)
        begin = self._decode(bytes(data or ()))
        if not text.endswith(REPLACEMENT) and not self._tokenizer.is_byte(token):
            # The detokenizer holds nothing of this token back.
            self.position = max(begin, self._final)
        return begin

    def _decode(self, data: bytes) -> int:
        """Counts the characters that the bytes of a token complete; returns the offset of the first byte's."""
        if not data:
            return self.position
        # The first byte completes nothing, its own character, a broken one before it, or both.
        text = self._decoder.decode(data[:1])
        if text and self._prompt_is_open:
            self._prompt_is_open = False
            if text.startswith(REPLACEMENT):
                self._final += self._apart
                self.position += self._apart - 1
        is_complete = not self._decoder.getstate()[0]
        begin = self.position + len(text) - is_complete
        self.position += len(text) + len(self._decoder.decode(data[1:]))
        return begin


def echo_offsets(
    tokenizer: Tokenizer | None, texts: TokenTexts, ids: Sequence[int], echo: str
) -> tuple[list[int], int]:
    """Returns where the characters of each token of a prompt begin in its text, and the number of complete ones.

    Args:
        tokenizer: the tokenizer.
        texts: the bytes of its tokens.
        ids: the prompt.
        echo: its text, which may lack special tokens that the tokenizer has added.
    """
    counted = TextOffsets(tokenizer, texts, skip_special_tokens=False)
    offsets = []
    for token in ids:
        at = min(counted.position, len(echo))
        is_absent = (
            tokenizer is not None
            and tokenizer.is_special(token)
            and not echo.startswith(texts.text(token), at)
        )
        offsets.append(at if is_absent else min(counted.push(token), len(echo)))
    return offsets, min(counted.position, len(echo))


def unfinished_bytes(texts: TokenTexts, ids: Sequence[int]) -> bytes:
    """Returns the bytes of a character that has begun at the end of some tokens and is incomplete."""
    found = b""
    for token in reversed(ids):
        found = bytes(texts.of(token)[1] or ()) + found
        if len(found) >= _LONGEST:
            break
    decoder = _Decoder("replace")
    decoder.decode(found)
    return decoder.getstate()[0]
