"""The tool calls of one answer: which names are functions of the request, and how a call's arguments are written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.json_text import read_value
from jaxkv.serve.parsers.source import Mismatch, Source, Steps
from jaxkv.text.markers import Markers

_NAME = re.compile(r"[\w.:/-]*")
_LONGEST_NAME = 256
_PREFIX = "functions."
_NUMBER = re.compile(r":\d+$")


class Calls:
    """The text of one answer and the calls read from it, as the readers of all formats use them.

    A call between markers counts even if the request has no function of its name, as in vLLM: agents answer it with
    an error that the model can read. A call without markers counts only if it names a function of the request, since
    any JSON object could be meant as text.

    Args:
        source: the text.
        answer: collects the calls as events.
        tools: the request's tools in OpenAI's form, `{"type": "function", "function": {"name": ...}}`, or flat.

    Attributes:
        source: the text.
        marked: whether the call that is being read stands behind a marker.
        begun: how many calls were begun.
        parameters: function -> the JSON schema of its parameters; empty if it has none.
    """

    def __init__(self, source: Source, answer: Answer, tools: Sequence[Mapping[str, Any]]) -> None:
        self.source = source
        self.marked = True
        self.begun = 0
        self.parameters = {
            name: parameters
            for tool in tools
            if isinstance(function := tool.get("function", tool), Mapping)
            and isinstance(name := function.get("name"), str)
            for parameters in [_schema(function.get("parameters"))]
        }
        self._answer = answer

    def checked(self, name: str) -> str:
        """Returns the name of a function as the request has it.

        Raises:
            Mismatch: no call can have this name.
        """
        if name in self.parameters:
            return name
        short = _NUMBER.sub("", name.removeprefix(_PREFIX))
        is_name = 0 < len(short) <= _LONGEST_NAME and _NAME.fullmatch(short)
        if short in self.parameters or (self.marked and is_name):
            return short
        raise Mismatch

    def read_name(self) -> Steps[str]:
        """Reads characters of which names consist, perhaps none."""
        return (yield from self.source.run(_NAME))

    def begin(self, name: str) -> None:
        """Begins a call; the text that was held for it becomes part of the call and no content."""
        self.source.drop()
        self.begun += 1
        self._answer.begin_call(name)

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the call that was begun."""
        self._answer.arguments(text)

    def content(self, text: str) -> None:
        """Adds text between or behind calls."""
        self._answer.content(text)

    def read_arguments(self, end: Markers | None) -> Steps[None]:
        """Reads a JSON value as the arguments; malformed ones as they are, up to a marker.

        The text after it is held, because it may belong to the call or to the content.

        Args:
            end: what ends a call of the format; without it, malformed arguments last to the end of the answer.
        """
        try:
            yield from read_value(self.source, self.arguments)
        except Mismatch:
            yield from self.read_malformed(end)
        self.source.hold()

    def read_malformed(self, end: Markers | None) -> Steps[None]:
        """Reads the rest of malformed arguments as they are, up to a marker or the end of the answer."""
        if end is None:
            yield from self.source.rest(self.arguments)
        else:
            yield from self.source.before(end, self.arguments)


def _schema(given: object) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}
