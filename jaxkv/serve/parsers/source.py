"""The text of an answer, read by a coroutine that waits where the next piece is missing."""

import re
from collections.abc import Callable, Generator

from jaxkv.text.markers import Markers

type Steps[T] = Generator[None, None, T]
"""A reader of text: yields when it needs the next piece, and returns what it read."""

MAX_HELD = 2**20
"""Most characters that are held for `restore`."""

_SPACES = re.compile(r"\s*")


class Mismatch(Exception):
    """The text is not what the reader expected."""


class Source:
    """The text that has arrived and was not read yet.

    A reader that is not sure of what it reads calls `hold` first. Then `release` returns all that was read since,
    `restore` puts it back, and `drop` forgets it. Reading more than `MAX_HELD` characters before one of them is a
    mismatch. How the text is cut into pieces changes only the pieces that are passed on, never their joined text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None
        self._held_size = 0

    def feed(self, piece: str) -> None:
        """Adds the next piece of the text."""
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        """Marks the end of the text."""
        self._ended = True

    def hold(self, read: str = "") -> None:
        """Begins to hold what is read; `read` is text that was read before and is held in front of it."""
        self._held, self._held_size = [read], len(read)

    def drop(self) -> None:
        """Forgets the held text, and holds no more."""
        self._held = None

    def release(self) -> str:
        """Returns the held text, and holds no more."""
        text = "".join(self._held or ())
        self._held = None
        return text

    def restore(self) -> None:
        """Puts the held text back, to be read again, and holds no more."""
        self._text = self.release() + self._text[self._at :]
        self._at = 0

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; an empty text at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def one(self) -> Steps[str]:
        """Reads one character.

        Raises:
            Mismatch: the text has ended.
        """
        if not (yield from self.peek()):
            raise Mismatch
        return self._read_to(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as long as characters match a pattern, which is of the form `[...]*`."""
        read = []
        while (yield from self.peek()) and (part := self.some(pattern)):
            read.append(part)
        return "".join(read)

    def some(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches a pattern in the text that is there."""
        found = pattern.match(self._text, self._at)
        return self._read_to(found.end()) if found else ""

    def spaces(self) -> Steps[str]:
        """Reads whitespace, perhaps none."""
        return (yield from self.run(_SPACES))

    def literal(self, text: str) -> Steps[bool]:
        """Reads a given text and returns true; reads nothing if something else follows."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._read_to(self._at + len(text))
                return True
            if self._ended or not text.startswith(there):
                return False
            yield

    def skip_cut_off(self, text: str) -> None:
        """Reads the rest if it is the beginning of a given text, which the end of the answer has cut off."""
        if self._ended and text.startswith(self._text[self._at :]):
            self._read_to(len(self._text))

    def expect(self, text: str) -> Steps[None]:
        """Reads a given text.

        Raises:
            Mismatch: something else follows.
        """
        if not (yield from self.literal(text)):
            raise Mismatch

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str]:
        """Reads to the end of the first marker and returns the marker; an empty text if there is none.

        Args:
            markers: the markers.
            emit: gets the text before the marker, in pieces as it arrives.
        """
        while True:
            before, after = markers.search(self._text, self._at, more=not self._ended)
            if before > self._at:
                emit(self._read_to(before))
            if after > before:
                return self._read_to(after)
            if self._ended:
                return ""
            yield

    def before(self, markers: Markers, emit: Callable[[str], None]) -> Steps[None]:
        """Reads to the start of the first marker, or to the end; arguments as for `until`."""
        while True:
            before, after = markers.search(self._text, self._at, more=not self._ended)
            if before > self._at:
                emit(self._read_to(before))
            if after > before or self._ended:
                return
            yield

    def form(self, names: Markers, emit: Callable[[str], None]) -> Steps[None]:
        """Reads structured output to the end, without the name of a token that ends it.

        Args:
            names: names of such tokens; elsewhere ordinary tokens spell them.
            emit: gets the text, in pieces as it arrives.
        """
        while name := (yield from self.until(names, emit)):
            if (yield from self.peek()):
                emit(name)

    def rest(self, emit: Callable[[str], None]) -> Steps[None]:
        """Reads to the end."""
        while (yield from self.peek()):
            emit(self._read_to(len(self._text)))

    def _read_to(self, end: int) -> str:
        full = False
        if self._held is not None:
            room = MAX_HELD - self._held_size
            full = end - self._at > room
            end = min(end, self._at + room)
            self._held.append(self._text[self._at : end])
            self._held_size += end - self._at
        text = self._text[self._at : end]
        self._at = end
        if full:
            raise Mismatch
        return text
