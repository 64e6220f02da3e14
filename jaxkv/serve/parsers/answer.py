"""`Answer`: collects the events of one answer, without the whitespace around markers."""

from itertools import groupby

from jaxkv.serve.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)

type Kind = type[Reasoning] | type[Content]


class Answer:
    """Collects events until they are taken.

    Line breaks that follow a marker and whitespace that precedes one belong to the marker: templates put them there
    and remove them again. So whitespace is held back until it is known what follows it.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Kind | ToolCallBegin | int, str]] = []
        self._calls = 0
        self._kind: Kind = Content
        self._spaces: list[str] = []
        self._after_marker = False

    def reasoning(self, text: str) -> None:
        """Adds a piece of reasoning."""
        self._add(Reasoning, text)

    def content(self, text: str) -> None:
        """Adds a piece of content."""
        self._add(Content, text)

    def marker(self) -> None:
        """Notes that reasoning or content begins or ends here."""
        self._spaces.clear()
        self._after_marker = True

    def begin_call(self, name: str) -> None:
        """Adds the beginning of the next call."""
        self.marker()
        self._pieces.append((ToolCallBegin(self._calls, name), ""))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the call that was begun last."""
        self._pieces.append((self._calls - 1, text))

    def end(self) -> None:
        """Notes the end of the answer."""
        if not self._after_marker:
            self._pieces.append((self._kind, "".join(self._spaces)))
        self._spaces.clear()

    def take(self) -> list[Event]:
        """Returns the events since the last time; neighbouring pieces of one kind are one event."""
        pieces, self._pieces = self._pieces, []
        events: list[Event] = []
        for kind, group in groupby(pieces, key=lambda piece: piece[0]):
            text = "".join(piece for _, piece in group)
            if isinstance(kind, ToolCallBegin):
                events.append(kind)
            elif text:
                events.append(
                    ToolCallArguments(kind, text) if isinstance(kind, int) else kind(text)
                )
        return events

    def _add(self, kind: Kind, text: str) -> None:
        if kind is not self._kind:
            self.marker()
            self._kind = kind
        body = text.rstrip()
        if body:
            whole = "".join((*self._spaces, body))
            self._pieces.append((kind, whole.lstrip("\n") if self._after_marker else whole))
            self._spaces.clear()
            self._after_marker = False
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])
