"""The answer of `/v1/responses`: the events of its stream, and the response that they build.

Source: Open Responses, https://www.openresponses.org. A stream and a plain answer run through the same object; the
plain one drops the events.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.serve.http.work import Usage
from jaxkv.serve.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)

Json = dict[str, Any]


class _Shape(NamedTuple):
    """The events that stream the text of one kind of item.

    Attributes:
        delta, done: types of the events.
        field: name of the text in the last event.
        part: type of the content part; empty for items without parts.
    """

    delta: str
    done: str
    field: str
    part: str = ""


_SHAPES = {
    "message": _Shape(
        "response.output_text.delta", "response.output_text.done", "text", "output_text"
    ),
    "reasoning": _Shape(
        "response.reasoning.delta", "response.reasoning.done", "text", "reasoning_text"
    ),
    "function_call": _Shape(
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "arguments",
    ),
}


class ResponsesStream:
    """One response while it is generated.

    Args:
        number: unique text, from which the ids of the response and its items are made.
        echoed: the fields of the response that repeat the request, such as "model" and "tools".

    Attributes:
        response: the response so far, as JSON.
    """

    def __init__(self, number: str, echoed: Mapping[str, Any]) -> None:
        self.response: Json = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "output": [],
            "usage": None,
            **echoed,
        }
        self._number = number
        self._sequence = 0
        self._item: Json | None = None
        self._text: list[str] = []

    def begin(self) -> list[Json]:
        """Returns the first events."""
        return [
            self._event("response.created", response=self.response | {"output": []}),
            self._event("response.in_progress", response=self.response | {"output": []}),
        ]

    def push(self, events: Sequence[Event], logprobs: Sequence[Json] = ()) -> list[Json]:
        """Returns the events of new text.

        Args:
            events: what the parser of the answer found.
            logprobs: log-probabilities of the text's tokens in the form of the API; they go with the first text among
                the events.
        """
        made: list[Json] = []
        for event in events:
            match event:
                case Content(text):
                    made += self._add("message", text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    made += self._add("reasoning", text)
                case ToolCallBegin(index, name):
                    call = {"call_id": f"call_{self._number}_{index}", "name": name}
                    made += self._begin_item("function_call", **call, arguments="")
                case ToolCallArguments(_, text):
                    made += self._add("function_call", text)
        return made

    def finish(self, reason: str | None, usage: Usage, reasoning_tokens: int = 0) -> list[Json]:
        """Returns the last events of a response that was generated.

        Args:
            reason: "stop", "length" or "tool_calls", as in chat completions.
            usage: token counts.
            reasoning_tokens: how many of the generated tokens are reasoning.
        """
        made = self._end_item("incomplete" if reason == "length" else "completed")
        self.response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": usage.prompt + usage.output,
        }
        if reason == "length":
            self.response["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*made, self._event("response.incomplete", response=self.response)]
        self.response |= {"status": "completed", "completed_at": int(time.time())}
        return [*made, self._event("response.completed", response=self.response)]

    def fail(self, code: str, message: str) -> list[Json]:
        """Returns the last events of a response that cannot be generated to its end."""
        made = self._end_item("incomplete")
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [*made, self._event("response.failed", response=self.response)]

    def _event(self, kind: str, **fields: Any) -> Json:  # noqa: ANN401 - values of JSON
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _place(self) -> Json:
        """Returns the fields that say to which item an event belongs."""
        assert self._item is not None, "an item was begun"
        place: Json = {
            "item_id": self._item["id"],
            "output_index": len(self.response["output"]) - 1,
        }
        return place | ({"content_index": 0} if _SHAPES[self._item["type"]].part else {})

    def _begin_item(self, kind: str, **fields: Any) -> list[Json]:  # noqa: ANN401 - values of JSON
        made = self._end_item("completed")
        output = self.response["output"]
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Json = {"id": f"{prefix}_{self._number}_{len(output)}", "type": kind, **fields}
        if kind == "message":
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item["status"] = "in_progress"
        output.append(item)
        self._item, self._text = item, []
        made.append(
            self._event("response.output_item.added", output_index=len(output) - 1, item=dict(item))
        )
        if part := _SHAPES[kind].part:
            made.append(
                self._event("response.content_part.added", **self._place(), part=_part(part, ""))
            )
        return made

    def _add(self, kind: str, text: str, logprobs: Sequence[Json] = ()) -> list[Json]:
        made = []
        if self._item is None or self._item["type"] != kind:
            made = self._begin_item(kind)
        self._text.append(text)
        fields: Json = {"logprobs": list(logprobs)} if kind == "message" else {}
        if logprobs and self._item is not None:
            self._item.setdefault("_logprobs", []).extend(logprobs)
        return [*made, self._event(_SHAPES[kind].delta, **self._place(), delta=text, **fields)]

    def _end_item(self, status: str) -> list[Json]:
        """Ends the current item, if there is one; returns its last events."""
        item = self._item
        if item is None:
            return []
        shape, text = _SHAPES[item["type"]], "".join(self._text)
        logprobs = item.pop("_logprobs", [])
        done: Json = {"name": item["name"]} if item["type"] == "function_call" else {}
        if item["type"] == "message":
            done = {"logprobs": logprobs}
        made = [self._event(shape.done, **self._place(), **{shape.field: text}, **done)]
        if shape.part:
            part = _part(shape.part, text, logprobs)
            item["content"] = [part]
            made.append(self._event("response.content_part.done", **self._place(), part=part))
        else:
            item["arguments"] = text
        if item["type"] != "reasoning":
            item["status"] = status
        at = len(self.response["output"]) - 1
        made.append(self._event("response.output_item.done", output_index=at, item=dict(item)))
        self._item = None
        return made


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Returns a content part."""
    if kind == "reasoning_text":
        return {"type": kind, "text": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": list(logprobs)}
