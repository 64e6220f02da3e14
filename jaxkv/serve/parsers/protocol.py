"""`OutputParser`: the interface of all parsers of an answer."""

from typing import Protocol, runtime_checkable

from jaxkv.serve.parsers.events import Event


@runtime_checkable
class OutputParser(Protocol):
    """Splits the text of one answer into events; the joined events do not depend on how the text is cut."""

    def push(self, text: str) -> list[Event]:
        """Returns the events that the next piece of the text makes certain.

        Args:
            text: the next piece, cut anywhere, even inside a marker.
        """
        ...

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back. Call it once, at the end of the answer."""
        ...
