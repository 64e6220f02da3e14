"""The loop that finds tool calls in content, for any format of calls."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.source import Mismatch, Source, Steps
from jaxkv.text.markers import Markers


@runtime_checkable
class ToolFormat(Protocol):
    """The format of tool calls in the answers of a family of models."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens of the model."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers before calls."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers after calls; any of them may be missing in an answer."""
        ...

    @property
    def unmarked(self) -> bool:
        """Whether an answer may also begin with a call without a marker."""
        ...

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls behind a marker; the loop removes the end markers that the reader leaves.

        Args:
            calls: what is read, and where calls are written. What is read is held, and dropped when a call begins;
                what belongs to no call is held again.
            marker: the marker, which was read; empty for a call without one.

        Raises:
            Mismatch: the text goes on in another way; what is held becomes content.
        """
        ...


def read_content(source: Source, answer: Answer, format: ToolFormat, calls: Calls) -> Steps[None]:
    """Reads content with tool calls to the end of the answer."""
    after_calls = calls.begun > 0
    if format.unmarked:
        after_calls |= yield from read_calls(source, answer.content, format, calls, "")
    if not format.begins:
        yield from source.rest(answer.content)
        return
    markers = Markers((*format.begins, *format.ends))
    while marker := (yield from source.until(markers, answer.content)):
        if marker in format.begins:
            after_calls = yield from read_calls(source, answer.content, format, calls, marker)
        elif after_calls:
            answer.marker()
        else:
            answer.content(marker)


def read_calls(
    source: Source, emit: Callable[[str], None], format: ToolFormat, calls: Calls, marker: str
) -> Steps[bool]:
    """Reads the calls behind a marker and returns whether there are any.

    Args:
        source: the text, behind the marker.
        emit: gets the text if it is no call.
        format: the format of the calls.
        calls: where they go.
        marker: the marker; empty for calls without one.
    """
    before = calls.begun
    calls.marked = bool(marker)
    source.hold(marker)
    try:
        yield from format.read(calls, marker)
    except Mismatch:
        # A call that the end of the answer cut off behind its arguments has lost nothing.
        if calls.begun > before and (yield from source.peek()):
            calls.content(source.release())
    if calls.begun == before:
        emit(source.release())
    source.drop()
    return calls.begun > before
