"""`GeneratedTokens`: the generated tokens of a request, without a copy of them."""

from collections.abc import Sequence
from typing import overload


class GeneratedTokens(Sequence[int]):
    """A view of a list of tokens from one place on, which grows with the list.

    A slice of the list would cost as much as the text is long, at each step.

    Args:
        tokens: tokens of the prompt and of the answer.
        begin: length of the prompt.
    """

    __slots__ = ("_begin", "_tokens")

    def __init__(self, tokens: Sequence[int], begin: int) -> None:
        self._tokens, self._begin = tokens, begin

    def __len__(self) -> int:
        return len(self._tokens) - self._begin

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Returns a token, or a list of tokens."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step > 0, "a slice of generated tokens goes forward"
            return self._tokens[self._begin + start : self._begin + stop : step]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} generated tokens, got index {index}")
        return self._tokens[self._begin + place]
