"""Generated ids to text as it becomes certain, up to the first stop string."""

from collections.abc import Sequence

from jaxkv.config.sampling import SamplingParams
from jaxkv.text.detokenize import Detokenizer
from jaxkv.text.tokenizer import Tokenizer


class StopStrings:
    """Finds the first of some strings in a text that comes in pieces, however it is cut.

    The first is the one that ends first; of several that end together, the longest. The text ends before it.

    Args:
        stops: the strings; none of them empty.
        included: the text ends behind the stop string instead.

    Attributes:
        met: the one that was met; `None` so far.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self.met: str | None = None
        self._stops = stops
        self._included = included
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, stops), default=0)
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
                end, start = min(ends)
                self.met = self._held[start:end]
                text, self._held = self._held[: end if self._included else start], ""
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
        lengths = range(min(self._longest - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if self._held[-n:] in self._beginnings), 0)


class TextStream:
    """One sequence's text.

    Args:
        tokenizer: turns ids to text.
        prompt: ids that the sequence follows.
        params: its stop strings, and what its text includes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, included=params.include_stop_str_in_output)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; `None` if none has."""
        return self._stops.met

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
