"""`/v1/responses`: answers in the form of Open Responses. The server keeps none of them."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

from jaxkv.serve.api.as_chat import fields_named
from jaxkv.serve.api.chat_turn import ChatTurn, TurnDelta, open_turn
from jaxkv.serve.api.responses_request import CHAT_NAMES, SCHEMA, as_chat, echoed
from jaxkv.serve.api.responses_stream import Json, ResponsesStream
from jaxkv.serve.api.token_logprobs import chat_logprobs
from jaxkv.serve.engine_client import EngineBusy, EngineLost, RequestRefused, SlowReader
from jaxkv.serve.http.errors import ApiError, from_engine
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import DONE, Answer, EventStream, Reply, typed_events
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service


async def responses(service: Service, request: Request) -> Answer:
    """Answers a request."""
    body = request.json()
    with fields_named(CHAT_NAMES):
        turn = await open_turn(service, request, as_chat(body))
        response = ResponsesStream(request.id, echoed(body, turn.body.model, turn.work.params))
        writer = _Writer(service, turn, response)
        if turn.body.stream:
            stream = EventStream(writer.stream(), service.limits.keep_alive_seconds)
            return await stream.begun()
        async with contextlib.aclosing(writer.events()) as events:
            async for _ in events:
                pass
        return Reply.json(response.response)


class _Writer:
    """Reads an answer and writes its events."""

    def __init__(self, service: Service, turn: ChatTurn, response: ResponsesStream) -> None:
        self._service = service
        self._turn = turn
        self._response = response

    async def events(self) -> AsyncGenerator[list[Json]]:
        """Yields the events of each piece of the answer."""
        made = self._response.begin()
        async with contextlib.aclosing(self._turn.deltas()) as deltas:
            async for batch in deltas:
                for new in batch:
                    made += self._response.push(new.events, self._logprobs(new))
                    if new.finish_reason is not None:
                        made += self._response.finish(
                            new.finish_reason, self._turn.usage, self._turn.reasoning_tokens
                        )
                yield made
                made = []

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yields the events as a stream; an error after the first ones is an event of the response."""
        begun = False
        try:
            async with contextlib.aclosing(self.events()) as events:
                async for made in events:
                    yield typed_events(made)
                    begun = True
        except (ApiError, RequestRefused, EngineBusy, EngineLost, SlowReader) as error:
            if not begun:
                raise
            wait = self._service.limits.retry_after_seconds
            known = error if isinstance(error, ApiError) else from_engine(error, wait)
            yield typed_events(self._response.fail(known.code, known.message))
        yield DONE

    def _logprobs(self, new: TurnDelta) -> Sequence[Json]:
        body, delta = self._turn.body, new.delta
        if not body.logprobs or delta.logprobs is None:
            return ()
        texts = self._service.token_texts
        listed = chat_logprobs(delta.ids, delta.logprobs, body.top_logprobs or 0, texts)
        return listed["content"]  # pyright: ignore[reportReturnType] - JSON


OPERATIONS = (
    Operation(
        path="/v1/responses",
        method="POST",
        handler=responses,
        summary="Answers a conversation in the form of Open Responses",
        body=SCHEMA,
        reply={
            "type": "object",
            "required": ["id", "object", "status", "output", "usage"],
            "properties": {
                "id": {"type": "string"},
                "object": {"const": "response"},
                "status": {"enum": ["completed", "incomplete"]},
                "output": {"type": "array", "items": {"type": "object"}},
                "usage": {"type": "object"},
            },
        },
        errors=(400, 401, 404, 413, 415, 429, 503, 504),
    ),
)
