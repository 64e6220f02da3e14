"""Marker strings in a text that arrives in pieces: where the first is, and where one may be beginning."""

import re
from collections.abc import Iterable


class Markers:
    """A set of strings, at least one and none empty, that are looked for in a text.

    Args:
        strings: the markers.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        longest_first = sorted({*strings}, key=len, reverse=True)
        self._longest = len(longest_first[0])
        self._any = re.compile("|".join(map(re.escape, longest_first)))
        self._first = re.compile("|".join({re.escape(marker[0]) for marker in longest_first}))
        self._beginnings = {
            marker[:length] for marker in longest_first for length in range(1, len(marker))
        }

    def search(self, text: str, start: int = 0, *, more: bool) -> tuple[int, int]:
        """Returns where the text before the first marker ends, and where the marker ends.

        The first marker is the one that starts first; among several with the same start, the longest. Both numbers
        are equal if no marker is certain: what follows them may be the beginning of one.

        Args:
            text: the text.
            start: where to begin.
            more: whether the text may go on.
        """
        held = self.possible_beginning(text, start) if more else len(text)
        found = self._any.search(text, start)
        return found.span() if found and found.start() < held else (held, held)

    def possible_beginning(self, text: str, start: int = 0) -> int:
        """Returns where the longest end of a text starts that is the beginning of a marker; its length if none is."""
        start = max(start, len(text) - self._longest + 1)
        for first in self._first.finditer(text, start):
            if text[first.start() :] in self._beginnings:
                return first.start()
        return len(text)
