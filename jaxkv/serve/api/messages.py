"""`/v1/messages` and `/v1/messages/count_tokens`: answers in the form of Anthropic's Messages API."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from jaxkv.serve.api.as_chat import fields_named
from jaxkv.serve.api.chat_turn import ChatTurn, open_turn
from jaxkv.serve.api.messages_request import CHAT_NAMES, COUNT_SCHEMA, SCHEMA, as_chat
from jaxkv.serve.api.messages_stream import MessagesStream
from jaxkv.serve.api.responses_stream import Json
from jaxkv.serve.http.errors import ApiError
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import Answer, EventStream, Reply, typed_events
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: ApiError, request_id: str) -> bytes:
    """Returns the error in Anthropic's form, which has no field for the field that is wrong; the message names it."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else _KINDS[400])
    body = {"type": kind, "message": error.message}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": request_id})


async def messages(service: Service, request: Request) -> Answer:
    """Answers a request."""
    with fields_named(CHAT_NAMES):
        turn = await open_turn(service, request, as_chat(request.json()))
        prompt_tokens = len(turn.work.prompts[0])
        message = MessagesStream(request.id, turn.body.model, prompt_tokens)
        if turn.body.stream:
            stream = EventStream(_stream(turn, message), service.limits.keep_alive_seconds)
            return await stream.begun()
        async with contextlib.aclosing(_events(turn, message)) as events:
            async for _ in events:
                pass
        return Reply.json(message.message)


async def count_tokens(service: Service, request: Request) -> Reply:
    """Answers the number of tokens of the prompt that a request would have."""
    with fields_named(CHAT_NAMES):
        turn = await open_turn(service, request, as_chat(request.json(), counts_only=True))
    return Reply.json({"input_tokens": len(turn.work.prompts[0])})


async def _events(turn: ChatTurn, message: MessagesStream) -> AsyncGenerator[list[Json]]:
    """Yields the events of each piece of an answer."""
    made = message.begin()
    async with contextlib.aclosing(turn.deltas()) as deltas:
        async for batch in deltas:
            for new in batch:
                made += message.push(new.events)
                if new.finish_reason is not None:
                    stop = new.delta.stop_reason
                    string = stop if isinstance(stop, str) else None
                    made += message.finish(new.finish_reason, string, turn.usage)
            yield made
            made = []


async def _stream(turn: ChatTurn, message: MessagesStream) -> AsyncGenerator[bytes]:
    """Yields the events of an answer as a stream."""
    async with contextlib.aclosing(_events(turn, message)) as events:
        async for made in events:
            yield typed_events(made)


def _object(**properties: Mapping[str, Any]) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


_ERRORS = (400, 401, 404, 413, 415, 429, 503, 504)

OPERATIONS = (
    Operation(
        path="/v1/messages",
        method="POST",
        handler=messages,
        summary="Answers a conversation in the form of Anthropic's Messages API",
        body=SCHEMA,
        reply=_object(
            id={"type": "string"},
            type={"const": "message"},
            role={"const": "assistant"},
            content={"type": "array", "items": {"type": "object"}},
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            usage={"type": "object"},
        ),
        errors=_ERRORS,
        error_form=messages_error,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        method="POST",
        handler=count_tokens,
        summary="Counts the tokens of a conversation",
        body=COUNT_SCHEMA,
        reply=_object(input_tokens={"type": "integer"}),
        errors=_ERRORS,
        error_form=messages_error,
    ),
)
