"""Answers in OpenAI's harmony format: messages with a channel, and with a recipient if they are tool calls."""

import re
from collections.abc import Collection

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.source import Mismatch, Source, Steps
from jaxkv.text.markers import Markers

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
FORM_HEADER = (_CHANNEL, "final")
"""Tokens with which the header of the message for the user begins."""

FORM_END = _MESSAGE
"""The token that ends a header."""

_HEADER_END = Markers([_MESSAGE, _START, *_ENDS])
_MESSAGE_ENDS = (_START, _CHANNEL, *_ENDS)
_MESSAGE_END = Markers(_MESSAGE_ENDS)
_BETWEEN = Markers([_START, _CHANNEL, _MESSAGE, *_ENDS])
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLE = re.compile(r"\s*\w*")


def open_header(prompt_end: str) -> str:
    """Returns what the prompt has of the message that the answer continues, such as "assistant"."""
    return prompt_end.rpartition(_START)[2] if _START in prompt_end else ""


class HarmonyReader:
    """Reads one answer.

    The channel "analysis" is reasoning; "final" is content, and so is "commentary" without a recipient, which the
    model writes for the user. A message to a function is a call, whatever its channel. A message to something else
    is for a tool inside the model's own environment, and is reasoning too.

    Args:
        source: the text.
        answer: where it goes.
        calls: where calls are written; `None` if messages to functions are content.
        reasoning: whether reasoning is kept apart; otherwise it is content.
        only_final: whether the channel "final" alone is content, because it is structured output.
        removed: texts of tokens that are no part of the answer, but may stand inside structured output.
    """

    def __init__(
        self,
        source: Source,
        answer: Answer,
        calls: Calls | None,
        *,
        reasoning: bool,
        only_final: bool = False,
        removed: Collection[str] = (),
    ) -> None:
        self._source = source
        self._answer = answer
        self._calls = calls
        self._think = answer.reasoning if reasoning else answer.content
        self._only_final = only_final
        self._removed = removed
        # What is in no channel, or in one for the user beside the final one.
        self._other = self._think if only_final else answer.content

    def read(self, header: str) -> Steps[None]:
        """Reads to the end.

        Args:
            header: what the prompt has of the first message; see `open_header`.
        """
        source = self._source
        if _MESSAGE in header:
            marker = yield from self._read_message(header)
        else:
            marker = yield from self._read_header(header)
        while marker or (yield from source.peek()):
            if marker == _START:
                marker = yield from self._read_header("")
            elif marker == _CHANNEL:
                marker = yield from self._read_header(_CHANNEL)
            elif marker == _MESSAGE:
                marker = yield from self._read_message("")
            else:
                marker = yield from source.until(_BETWEEN, self._other)

    def _read_header(self, begun: str) -> Steps[str]:
        """Reads a header with its message, and returns the marker behind it."""
        pieces: list[str] = []
        marker = yield from self._source.until(_HEADER_END, pieces.append)
        text = "".join(pieces)
        if marker == _MESSAGE:
            return (yield from self._read_message(begun + text))
        if not any(part in begun + text for part in (_CHANNEL, _CONSTRAIN, "to=")):
            # A model that does not keep to the format; only the role can belong to a header.
            self._other(text if begun else _ROLE.sub("", text, count=1))
        return marker

    def _read_message(self, header: str) -> Steps[str]:
        """Reads a message behind its header, and returns the marker behind it."""
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        channel = _IN_CHANNEL.search(header)
        function = self._function(recipient)
        self._answer.marker()
        if self._calls and function:
            return (yield from self._read_call(self._calls, function))
        is_internal = recipient not in ("", "assistant") and not function
        if self._only_final and header.endswith("".join(FORM_HEADER)):
            names = Markers((*_ENDS, *self._removed))
            yield from self._source.form(names, self._answer.content)
            return ""
        is_reasoning = is_internal or (channel is not None and channel[1] == "analysis")
        emit = self._think if is_reasoning else self._other
        ends = Markers((*_MESSAGE_ENDS, *self._removed)) if self._removed else _MESSAGE_END
        while (marker := (yield from self._source.until(ends, emit))) in self._removed:
            pass
        self._answer.marker()
        return marker

    def _function(self, recipient: str) -> str | None:
        """Returns the name of the function that a message is for; `None` if it is for something else."""
        known = self._calls.parameters if self._calls else {}
        if not recipient.startswith("functions.") and recipient not in known:
            return None
        if self._calls is None:
            return recipient
        try:
            return self._calls.checked(recipient)
        except Mismatch:
            return None

    def _read_call(self, calls: Calls, function: str) -> Steps[str]:
        source = self._source
        calls.begin(function)
        yield from source.spaces()
        if (yield from source.peek()) == "{":
            yield from calls.read_arguments(_MESSAGE_END)
            source.drop()
            return (yield from source.until(_MESSAGE_END, self._answer.content))
        pieces = 0

        def write(text: str) -> None:
            nonlocal pieces
            pieces += 1
            calls.arguments(text)

        marker = yield from source.until(_MESSAGE_END, write)
        if marker and not pieces:
            calls.arguments("{}")
        return marker
