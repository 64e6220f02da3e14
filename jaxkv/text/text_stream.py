"""Incremental text of one sequence, up to the first stop string."""

from collections.abc import Sequence

from jaxkv.config.sampling import SamplingParams
from jaxkv.text.detokenize import Detokenizer
from jaxkv.text.markers import Markers
from jaxkv.text.tokenizer import Tokenizer


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces; the result does not depend on the pieces.

    The first stop string is the one that ends first; among several with the same end, the longest.

    Args:
        stops: the stop strings, none of them empty.
        included: whether the text ends after the stop string; otherwise it ends before.

    Attributes:
        met: the stop string that was found; `None` before.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self.met: str | None = None
        self._stops = stops
        self._included = included
        self._markers = Markers(stops) if stops else None
        self._pending = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Adds a piece; returns the text that has become final, and whether a stop string was found.

        Args:
            piece: the next piece of the text.
            may_stop: whether stop strings that end within this piece count.
        """
        if self._markers is None:
            return piece, False
        before, self._pending = len(self._pending), self._pending + piece
        if may_stop:
            ends = [
                (at + len(stop), at)
                for stop in self._stops
                if (at := self._pending.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if ends:
                end, start = min(ends)
                self.met = self._pending[start:end]
                text, self._pending = self._pending[: end if self._included else start], ""
                return text, True
        final = self._markers.possible_beginning(self._pending)
        text, self._pending = self._pending[:final], self._pending[final:]
        return text, False

    def finish(self) -> str:
        """Returns the remaining text at the end of the sequence."""
        text, self._pending = self._pending, ""
        return text


class TextStream:
    """The text of one sequence, decoded incrementally and ended by its stop strings.

    Args:
        tokenizer: the tokenizer.
        prompt: ids before the sequence.
        params: its stop strings and text options.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop, included=params.include_stop_str_in_output)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; `None` if there is none."""
        return self._stops.met

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """Adds a token; returns the text that has become final, and whether a stop string ended it.

        Raises:
            ValueError: the id is outside the model's range.
        """
        return self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def finish(self, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the remaining text, and whether a stop string was found in it. Call it once, at the end."""
        text, met = self._stops.push(self._detokenizer.finish(), may_stop=may_stop)
        return (text, True) if met else (text + self._stops.finish(), False)
