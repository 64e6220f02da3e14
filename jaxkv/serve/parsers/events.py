"""The events of an answer as clients see them: pieces of reasoning, of content and of tool calls."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """The next piece of what the model thinks before it answers.

    Attributes:
        text: the piece, never empty.
    """

    text: str


@dataclass(frozen=True)
class Content:
    """The next piece of the answer itself.

    Attributes:
        text: the piece, never empty.
    """

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call begins; the pieces of its arguments follow.

    Attributes:
        index: how many calls of the same answer precede it.
        name: the function.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all pieces of one call, joined, are one JSON object.

    They are as good as what the model wrote: an answer that ends too early has a part of an object, and malformed
    arguments stay malformed.

    Attributes:
        index: the call.
        text: the piece, never empty.
    """

    index: int
    text: str


Event = Reasoning | Content | ToolCallBegin | ToolCallArguments
