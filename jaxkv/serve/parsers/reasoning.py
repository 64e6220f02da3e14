"""The reasoning at the beginning of an answer, between markers."""

from collections.abc import Collection
from dataclasses import dataclass

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.source import Source, Steps
from jaxkv.serve.parsers.tool_format import ToolFormat, read_calls
from jaxkv.text.markers import Markers


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of reasoning in the answers of a family of models.

    Attributes:
        begins: markers before it.
        ends: markers behind it.
        removed: further markers around the answer, which are no text.
        always: whether a model that was asked to think does so without a marker too.
        ends_at_call: whether a tool call ends the reasoning too.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    removed: tuple[str, ...] = ()
    always: bool = False
    ends_at_call: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.begins, *self.ends, *self.removed)

    def is_open(
        self, prompt_end: str, special_tokens: Collection[str], thinking: bool | None
    ) -> bool:
        """Returns whether an answer begins inside the reasoning.

        Args:
            prompt_end: the end of the prompt, in which templates of some models begin or even end the reasoning.
            special_tokens: texts of special tokens; one behind a marker ends the turn in which the marker stands.
            thinking: whether the request asks for reasoning; `None` if it says nothing.
        """
        at, marker = max((prompt_end.rfind(marker), marker) for marker in self.begins)
        behind = prompt_end[at + len(marker) :]
        if at < 0 or any(token in behind for token in special_tokens):
            is_ended = any(prompt_end.rstrip().endswith(end) for end in self.ends)
            return self.always and thinking is True and not is_ended
        if any(end in behind for end in self.ends):
            return False
        return bool(special_tokens) or not behind.strip()


def read_reasoning(
    source: Source,
    answer: Answer,
    format: ReasoningFormat,
    *,
    is_open: bool,
    tool_format: ToolFormat | None,
    calls: Calls,
    removed: Collection[str] = (),
) -> Steps[None]:
    """Reads the reasoning, if the answer begins with it, and what ends it.

    Without an end marker all of the answer is reasoning. Tool calls inside it are text, except in formats that they
    end: Qwen3.5 forgets the marker before a call.

    Args:
        source: the text.
        answer: where the reasoning goes.
        format: its markers.
        is_open: whether it has begun already; the marker may come nevertheless.
        tool_format: the format of tool calls; `None` if they are not read.
        calls: where calls go.
        removed: texts of tokens that are no part of the reasoning.
    """
    spaces = yield from source.spaces()
    for begin in format.begins:
        if (yield from source.literal(begin)):
            break
    else:
        if not is_open:
            answer.content(spaces)
            return
    answer.marker()
    begins = tool_format.begins if tool_format and format.ends_at_call else ()
    markers = Markers((*format.ends, *begins, *removed))
    while marker := (yield from source.until(markers, answer.reasoning)):
        if marker in format.ends:
            answer.marker()
            return
        if marker in removed:
            continue
        if tool_format and (
            yield from read_calls(source, answer.reasoning, tool_format, calls, marker)
        ):
            return
