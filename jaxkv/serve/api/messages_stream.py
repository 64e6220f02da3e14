"""The answer of `/v1/messages`: the events of its stream, and the message that they build.

Source: Anthropic's Messages API. A stream and a plain answer run through the same object; the plain one drops the
events.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxkv.serve.api.responses_stream import Json
from jaxkv.serve.http.work import Usage
from jaxkv.serve.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from jaxkv.serve.parsers.json_text import loads
from jaxkv.serve.parsers.source import Mismatch

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas and name of their text."""

_CALLER = {"type": "direct"}
"""Who calls a tool: the model itself, and not a program that it wrote."""

_NO_DETAILS = {"inference_geo": None, "service_tier": None}
"""Fields of a message's usage that mean nothing here, but that the API's schema requires."""


class MessagesStream:
    """One message while it is generated.

    Args:
        number: unique text, from which the ids of the message and its tool calls are made.
        model: name of the model.
        prompt_tokens: length of the prompt.

    Attributes:
        message: the message so far, as JSON.
    """

    def __init__(self, number: str, model: str, prompt_tokens: int) -> None:
        self.message: Json = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": _usage(Usage(prompt=prompt_tokens, output=0, cached=0))
            | {"cache_creation": None, **_NO_DETAILS},
        }
        self._number = number
        self._text: list[str] = []
        self._open = False

    def begin(self) -> list[Json]:
        """Returns the first event."""
        return [{"type": "message_start", "message": self.message | {"content": []}}]

    def push(self, events: Sequence[Event]) -> list[Json]:
        """Returns the events of new text, which the parser of the answer found."""
        made: list[Json] = []
        for event in events:
            match event:
                case Content(text):
                    made += self._add("text", text)
                case Reasoning(text):
                    made += self._add("thinking", text)
                case ToolCallBegin(index, name):
                    made += self._begin_block(
                        "tool_use",
                        id=f"toolu_{self._number}_{index}",
                        name=name,
                        input={},
                        caller=_CALLER,
                    )
                case ToolCallArguments(_, text):
                    made += self._add("tool_use", text)
        return made

    def finish(self, reason: str | None, stop_string: str | None, counted: Usage) -> list[Json]:
        """Returns the last events.

        Args:
            reason: "stop", "length" or "tool_calls", as in chat completions.
            stop_string: the stop sequence that ended the text; `None` if none did.
            counted: token counts.
        """
        stop = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason or "", "end_turn")
        if stop_string is not None and reason == "stop":
            stop = "stop_sequence"
        made = self._end_block()
        usage = _usage(counted)
        self.message |= {"stop_reason": stop, "stop_sequence": stop_string}
        self.message["usage"] = self.message["usage"] | usage
        delta = {"stop_reason": stop, "stop_sequence": stop_string}
        delta |= {"stop_details": None, "container": None}
        return [
            *made,
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def _begin_block(self, kind: str, **fields: Any) -> list[Json]:  # noqa: ANN401 - values of JSON
        made, blocks = self._end_block(), self.message["content"]
        blank = {
            "text": {"text": "", "citations": None},
            "thinking": {"thinking": "", "signature": ""},
        }
        block = {"type": kind, **blank.get(kind, {}), **fields}
        blocks.append(block)
        self._text, self._open = [], True
        start = {"type": "content_block_start", "index": len(blocks) - 1}
        return [*made, start | {"content_block": dict(block)}]

    def _add(self, kind: str, text: str) -> list[Json]:
        blocks, made = self.message["content"], []
        if not self._open or blocks[-1]["type"] != kind:
            made = self._begin_block(kind)
        self._text.append(text)
        name, field = _DELTAS[kind]
        delta = {"type": name, field: text}
        return [*made, {"type": "content_block_delta", "index": len(blocks) - 1, "delta": delta}]

    def _end_block(self) -> list[Json]:
        """Ends the current block, if there is one; returns its last events."""
        if not self._open:
            return []
        blocks = self.message["content"]
        block, text = blocks[-1], "".join(self._text)
        if block["type"] == "tool_use":
            block["input"] = _as_input(text)
        else:
            block[_DELTAS[block["type"]][1]] = text
        self._open = False
        return [{"type": "content_block_stop", "index": len(blocks) - 1}]


def _usage(counted: Usage) -> Json:
    """Returns token counts in the form of the API, which counts cached tokens apart."""
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.output,
        "output_tokens_details": None,
        "server_tool_use": None,
    }


def _as_input(text: str) -> object:
    """Returns the arguments of a call; those that no reply can hold as JSON are given as text under "partial_json"."""
    try:
        given = loads(text or "{}")
        # Escapes may stand for half of a character.
        msgspec.json.encode(given)
    except (Mismatch, UnicodeEncodeError):
        return {"partial_json": text}
    return given if isinstance(given, dict) else {"value": given}
