"""`NgramDrafter`: guesses that a text goes on as it did after the last n tokens were seen before. Imports no JAX."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from jaxkv.engine.request_state import RequestState

_BYTES = 4
"""Bytes of a token id in the searched text."""


class NgramDrafter:
    """Prompt lookup (Saxena, 2023): the tokens behind the last earlier place that has the same n tokens.

    It tries the longest n first. It suits tasks whose output repeats the input, such as edits of code and summaries.

    Args:
        longest: most tokens that must be equal.
        shortest: fewest tokens that must be equal.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        # The tokens of each request as bytes, which Python searches fast.
        self._texts: WeakKeyDictionary[RequestState, bytearray] = WeakKeyDictionary()

    def draft(
        self, sequences: Sequence[RequestState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Returns up to `most` tokens for each request; none for a text whose end was not seen before."""
        return [self._after(one, count) for one, count in zip(sequences, most, strict=True)]

    def _after(self, sequence: RequestState, most: int) -> tuple[int, ...]:
        text = self._texts.setdefault(sequence, bytearray())
        text += np.asarray(sequence.tokens[len(text) // _BYTES :], "<i4").tobytes()
        for length in self._lengths:
            if length * _BYTES >= len(text):
                continue
            found = _last_place(text, len(text) - length * _BYTES)
            if found is not None:
                start = found + length * _BYTES
                follows = text[start : start + most * _BYTES]
                return tuple(np.frombuffer(bytes(follows), "<i4").tolist())
        return ()


def _last_place(text: bytearray, end: int) -> int | None:
    """Returns the last offset before `end` of the bytes from `end` on, at a whole token; `None` if there is none."""
    wanted, stop = bytes(text[end:]), len(text) - _BYTES
    while (found := text.rfind(wanted, 0, stop)) >= 0:
        if found % _BYTES == 0:
            return found
        stop = found + len(wanted) - 1
    return None
