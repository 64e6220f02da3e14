"""Generated ids to text as it becomes certain, up to the first stop string. Knows no requests."""

from jaxkv.engine.detokenize import Detokenizer
from jaxkv.tokenizer import Tokenizer


class StopStrings:
    """Looks for the first of some strings in a text that comes in pieces, however it is cut.

    The first is the one that ends first; of several that end together, the longest. It is no part of the text.

    Args:
        stops: the strings; none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns what of the text is certain not to belong to a stop string, and whether one was met.

        Args:
            piece: the next piece.
            may_stop: what ends within this piece counts.
        """
        if not self._stops:
            return piece, False
        before, self._held = len(self._held), self._held + piece
        if may_stop:
            ends = [
                (at + len(stop), at)
                for stop in self._stops
                if (at := self._held.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if ends:
                text, self._held = self._held[: min(ends)[1]], ""
                return text, True
        certain = len(self._held) - self._suspected()
        text, self._held = self._held[:certain], self._held[certain:]
        return text, False

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _suspected(self) -> int:
        """Returns how many of the last characters may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One sequence's text.

    Args:
        tokenizer: turns ids to text.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the text that is certain now and was not before, and whether a stop string ended it.

        Raises:
            ValueError: the id is none of the model's.
        """
        return self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def finish(self, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the rest of the text, and whether a stop string was found in it. Call it once, at the end."""
        text, met = self._stops.push(self._detokenizer.finish(), may_stop=may_stop)
        return (text, True) if met else (text + self._stops.finish(), False)
