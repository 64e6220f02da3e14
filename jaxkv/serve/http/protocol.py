"""The protocol of one connection: uvicorn's, with deadlines for what a client sends and takes, and bounds on headers.

Uvicorn has none of these itself: a client that sends one byte a minute, or reads none, would hold its connection.
"""

import asyncio
import secrets
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxkv.serve.http.errors import ApiError, openai_error, unavailable
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.http.lingering import Lingering, LingeringTransport

_HEADER_EXTRA = 4
"""Bytes of a header beside its name and value."""


def connection_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Returns the class for `uvicorn.Config(http=...)`."""
    lingering = Lingering(limits.lingering, limits.linger_seconds)
    made = {"limits": limits, "lingering": lingering}
    return type("LimitedProtocol", (_LimitedProtocol,), made)


class _Refused(Exception):
    """A request that is answered before any route sees it; the parser passes it on as its own error."""


class _LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: Limits
    lingering: Lingering

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - that of uvloop is no asyncio.Transport
        """Begins to wait for a request, unless there are too many connections."""
        self._refusal: ApiError | None = None
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_head, self._in_body = True, False
        self._head_bytes = self._headers = 0
        self._lingering = LingeringTransport(transport, self.lingering, self._may_send)
        made: Any = self._lingering
        super().connection_made(made)
        if len(self.connections) - len(self.lingering) > self.limits.connections:
            wait = self.limits.retry_after_seconds
            self._refuse(unavailable("too_many_connections", "too many connections", wait))
            return
        self._expect(self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the deadlines."""
        self._expect(None)
        self._cancel_writing()
        self._lingering.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what the client sent; drops it once the connection is closed."""
        if self.transport.is_closing():
            return
        before = self._head_bytes
        super().data_received(data)
        if self._refusal is None and self._in_head and self.parser is not None:
            # An endless line reaches no callback.
            self._head_bytes = max(self._head_bytes, before + len(data))
            if self._head_bytes > self.limits.head_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._headers = 0
        self._expect(self.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        """Counts the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header."""
        self._headers += 1
        self._count(len(name) + len(value) + _HEADER_EXTRA)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Goes on to the body."""
        self._in_head, self._in_body = False, True
        self._expect(self.limits.body_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._in_body = False
        self._expect(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client takes too little of its reply."""
        super().pause_writing()
        self._cancel_writing()
        self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken enough."""
        self._cancel_writing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser did not take."""
        del msg
        if self._refusal is None:
            self._refuse(ApiError(400, "invalid_http", "the request is no valid HTTP/1.1"))

    def _may_send(self) -> bool:
        """Returns whether a part of a request is still to come, or was refused before all of it was read."""
        return self._in_body or self._refusal is not None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.head_bytes or self._headers > self.limits.headers:
            self._refuse(self._too_large())
            raise _Refused

    def _too_large(self) -> ApiError:
        return ApiError(
            431,
            "headers_too_large",
            f"the request line and headers are too large, at most {self.limits.headers} headers and "
            f"{self.limits.head_bytes} bytes are read",
        )

    def _expect(self, seconds: float | None) -> None:
        """Sets the deadline of what the client sends next; `None` for nothing."""
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None
        if seconds is not None:
            self._receiving = self.loop.call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and self._in_head):
            # Not the client's fault: nothing is read, or a reply to an earlier request is under way.
            self._expect(seconds)
        elif answering and self.cycle.response_started:
            self.transport.abort()
        else:
            what = "headers" if self._in_head else "body"
            self._refuse(
                ApiError(408, "request_timeout", f"the {what} took more than {seconds:g} s")
            )

    def _refuse(self, error: ApiError) -> None:
        """Answers with an error and closes the connection."""
        self._refusal = error
        self._expect(None)
        if self.cycle is not None and not self.cycle.response_complete:
            # The route that waits for the body must not write too.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        request_id = secrets.token_hex(12)
        body = openai_error(error, request_id)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": request_id,
            **error.headers,
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.transport.close()

    def _cancel_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None
