"""What handlers return: a JSON reply, or a stream of server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.types import Send

from jaxkv.serve.http.errors import ApiError, ErrorForm

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


def event(value: object, name: str = "") -> bytes:
    """Returns one server-sent event with JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", _ENCODER.encode(value), b"\n\n"))


@dataclass(frozen=True)
class Reply:
    """A whole reply.

    Attributes:
        body: its bytes.
        status: the HTTP status.
        content_type: of the body.
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


@dataclass(frozen=True)
class EventStream:
    """A reply of server-sent events.

    Attributes:
        events: pieces of the stream, each of one or more whole events. An `ApiError` of it ends the stream with an
            error event. It is closed when the client goes.
        keep_alive_seconds: a stream without news for so long gets a comment line.
    """

    events: AsyncGenerator[bytes]
    keep_alive_seconds: float = 15.0

    async def send(self, send: Send) -> None:
        """Sends the stream to its end.

        Raises:
            ApiError: of `events`; the reply has begun.
        """
        async with contextlib.aclosing(self.events):
            beat = _Beat(send, self.keep_alive_seconds)
            await send(
                _start(200, {"content-type": "text/event-stream", "cache-control": "no-store"})
            )
            with beat.running():
                async for piece in self.events:
                    await beat.send(piece)
            await send({"type": "http.response.body", "body": b""})


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
