"""The parser of one answer: a reader of the text, driven by the pieces as they arrive."""

from collections.abc import Callable

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.events import Event
from jaxkv.serve.parsers.source import Source, Steps
from jaxkv.text.markers import Markers


class AnswerParser:
    """Runs a reader as far as the text goes; an `OutputParser`.

    Args:
        read: returns the reader of an answer, which reads to the end.
        removed: texts of tokens that are no part of the answer, such as the end of a turn; `None` if there are none.
    """

    def __init__(
        self, read: Callable[[Source, Answer], Steps[None]], removed: Markers | None
    ) -> None:
        self._raw = Source()
        self._kept: list[str] = []
        self._source = Source()
        self._answer = Answer()
        self._removing = None if removed is None else self._without(removed)
        self._reading = read(self._source, self._answer)

    def push(self, text: str) -> list[Event]:
        """Returns the events that the next piece of the text makes certain."""
        if self._removing is None:
            self._source.feed(text)
        else:
            self._raw.feed(text)
            self._remove(self._removing)
        next(self._reading, None)
        return self._answer.take()

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back."""
        if self._removing is not None:
            self._raw.end()
            self._remove(self._removing)
        self._source.end()
        next(self._reading, None)
        self._answer.end()
        return self._answer.take()

    def _remove(self, removing: Steps[None]) -> None:
        """Passes the text that has arrived on to the reader, without the tokens that are removed."""
        next(removing, None)
        self._source.feed("".join(self._kept))
        self._kept.clear()

    def _without(self, removed: Markers) -> Steps[None]:
        while (yield from self._raw.until(removed, self._kept.append)):
            pass
