"""The replies that handlers return: JSON, or a stream of server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Send

from jaxkv.serve.http.errors import ApiError, ErrorForm

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
FIRST_SECONDS = 1.0
"""How long the reply of a stream waits for the first tokens, since the engine may refuse the request instead."""

_COMMENT = b": keep-alive\n\n"


def event(value: object, name: str = "") -> bytes:
    """Returns one server-sent event with JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", _ENCODER.encode(value), b"\n\n"))


def typed_events(values: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns server-sent events, each named by the "type" of its JSON."""
    return b"".join(event(value, value["type"]) for value in values)


def chunk(head: bytes, tail: object) -> bytes:
    """Returns an event whose constant part is encoded already.

    Args:
        head: the JSON of an object without its last brace.
        tail: the rest of its fields.
    """
    return b"".join((b"data: ", head, b",", _ENCODER.encode(tail)[1:], b"\n\n"))


@dataclass(frozen=True)
class Reply:
    """A whole reply.

    Attributes:
        body: its bytes.
        status: the HTTP status.
        content_type: content type of the body.
        headers: further headers.
    """

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: object, status: int = 200) -> "Reply":
        """Returns a reply with a JSON value, or with a struct."""
        return cls(_ENCODER.encode(value), status)

    async def send(self, send: Send) -> None:
        """Sends the reply."""
        headers = {
            "content-type": self.content_type,
            "content-length": str(len(self.body)),
            **self.headers,
        }
        await send(_start(self.status, headers))
        await send({"type": "http.response.body", "body": self.body})


class EventStream:
    """A reply of server-sent events.

    Args:
        events: pieces of the stream, each of one or more whole events; closed at the end.
        keep_alive_seconds: a stream without an event for this time gets a comment line.
    """

    def __init__(self, events: AsyncGenerator[bytes], keep_alive_seconds: float) -> None:
        self._events = events
        self._seconds = keep_alive_seconds
        loop = asyncio.get_running_loop()
        self._has_begun: asyncio.Future[None] = loop.create_future()
        # Eager: the prompt is in the engine at once.
        self._first = asyncio.eager_task_factory(loop, self._take_first())

    async def begun(self, seconds: float = FIRST_SECONDS) -> "EventStream":
        """Returns the stream when its first piece is there, or `seconds` have passed.

        An error that comes first is raised, so that its reply has a status of its own.
        """
        loop = asyncio.get_running_loop()
        late = loop.call_later(seconds, _settle, self._has_begun)
        try:
            await self._has_begun
            late.cancel()
            if self._first.done():
                self._first.result()
        except BaseException:
            await self._close()
            raise
        return self

    async def send(self, send: Send) -> None:
        """Sends the stream to its end, and raises the errors of `events`, after which the reply has begun."""
        try:
            headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
            await send(_start(200, headers))
            beat = _Beat(send, self._seconds)
            with beat.running():
                piece = await self._first
                while piece is not None:
                    if piece:
                        await beat.send(piece)
                    piece = await _next(self._events)
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._close()

    async def _take_first(self) -> bytes | None:
        try:
            return await _next(self._events)
        finally:
            _settle(self._has_begun)

    async def _close(self) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()


def _settle(waited: asyncio.Future[None]) -> None:
    if not waited.done():
        waited.set_result(None)


async def _next(events: AsyncGenerator[bytes]) -> bytes | None:
    return await anext(events, None)


Answer = Reply | EventStream


class _Beat:
    """Sends pieces of a stream, and a comment when none came for a while."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._sent = 0

    async def send(self, piece: bytes) -> None:
        self._sent += 1
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        before = self._sent
        while True:
            await asyncio.sleep(self._seconds)
            if self._sent == before:
                await self.send(_COMMENT)
            before = self._sent


def error_reply(error: ApiError, form: ErrorForm, request_id: str) -> Reply:
    """Returns an error as a whole reply."""
    return Reply(form(error, request_id), error.status, headers=error.headers)


def error_event(error: ApiError, form: ErrorForm, request_id: str) -> bytes:
    """Returns an error as the last event of a stream that has begun."""
    return b"".join((b"event: error\ndata: ", form(error, request_id), b"\n\n"))


def _start(status: int, headers: Mapping[str, str]) -> dict[str, object]:
    pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}
