"""One HTTP/1.1 request and its answer; the body is handed on as it arrives.

Connections are used again, as the clients of OpenAI and vLLM do: a new one would add its set-up to each first token.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httptools

_MOST_OF_AN_ERROR = 65536
"""Bytes of an error's body that are kept."""

_SECONDS_TO_END = 1.0
"""How long a connection may take to end the body behind the last event; otherwise it is closed."""


class ExchangeFailed(Exception):
    """The server could not be reached, or its answer broke off or was no HTTP."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """The address of a server, and the headers of all requests to it.

    Attributes:
        host: name or address.
        port: TCP port.
        prefix: what stands before the paths of requests, without a slash at its end.
        tls: whether connections are encrypted.
        headers: headers of every request.
        idle: open connections that wait for another request; the one that was used last is taken first.
    """

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idle: "list[Exchange]" = field(default_factory=list, repr=False, compare=False)

    def close(self) -> None:
        """Closes the idle connections."""
        while self.idle:
            self.idle.pop().abort()

    def request(self, path: str, body: bytes | None) -> bytes:
        """Returns the bytes of a request: a POST with a body of JSON, or a GET without one."""
        port = "" if self.port in (80, 443) else f":{self.port}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}{port}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def server_at(base_url: str, api_key: str | None = None) -> Server:
    """Reads an address such as "http://127.0.0.1:8000" or "https://host/prefix/v1"; "/v1" at its end is left out.

    Raises:
        ValueError: it is no such address, or the key cannot be a header.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(
            f"the base URL must be like http://127.0.0.1:8000 or https://host/v1, got {base_url!r}"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key must be printable ASCII on one line")
    secure = parts.scheme == "https"
    return Server(
        host=parts.hostname,
        port=parts.port or (443 if secure else 80),
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        tls=ssl.create_default_context() if secure else None,
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
    )


class Exchange(asyncio.Protocol):
    """The answer to one request of a connection.

    Attributes:
        status: HTTP status; 0 until it came.
        ended: done once the answer is complete, `finish` was called, or the connection was lost.
        error_body: the first bytes of the body of an answer other than 200.
    """

    def __init__(self, on_body: "Callable[[Exchange, bytes], None]") -> None:
        """Takes what is called with the exchange and each part of the body of an answer of status 200."""
        self.status = 0
        self._transport: Any = None
        self._idle: list[Exchange] | None = None
        self._is_complete = self._is_lost = self._stays_open = False
        self._received = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nothing awaits an exchange that timed out, and asyncio would log its failure.
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.error_body = b""
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body

    @property
    def found_it_closed(self) -> bool:
        """Whether the connection was lost before anything came."""
        return self._is_lost and not self._received

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - that of uvloop is no asyncio.Transport
        """Takes the connection."""
        self._transport = transport

    def send(self, request: bytes) -> None:
        """Sends the request."""
        assert self._transport is not None, "it is connected"
        self._transport.write(request)

    def follow(self, before: "Exchange") -> None:
        """Takes the connection of an earlier exchange, which is idle."""
        assert before._transport is not None, "it was connected"
        self._transport = before._transport
        self._transport.set_protocol(self)

    def release(self, idle: "list[Exchange]") -> None:
        """Leaves the connection for another request, once the rest of this answer has come; or closes it."""
        if self.ended.cancelled() or not self.ended.done() or self.ended.exception() is not None:
            self.abort()
            return
        self._idle = idle
        if self._is_complete:
            self._wait_for_another()
        else:
            # The end of the body, which no timeline needs.
            asyncio.get_running_loop().call_later(_SECONDS_TO_END, self._end_waiting)

    def stay_idle(self, idle: "list[Exchange]") -> None:
        """Leaves a new connection for the first request."""
        self._idle, self._stays_open = idle, True
        self._wait_for_another()

    def abort(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _wait_for_another(self) -> None:
        if self._idle is None or self._is_lost:
            return
        if self._stays_open:
            self._idle.append(self)
        else:
            self.abort()

    def _end_waiting(self) -> None:
        if not self._is_complete:
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Parses a part of the answer."""
        self._received += len(data)
        if self._idle is not None and self in self._idle:
            self._idle.remove(self)
            self.abort()  # Nothing was asked for.
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails if the answer is not complete."""
        self._is_lost = True
        if self._idle is not None and self in self._idle:
            self._idle.remove(self)
        self._fail(f"the connection broke off{f': {exc}' if exc else ''}")

    def finish(self) -> None:
        """Ends the exchange: no more of the answer is needed."""
        if not self.ended.done():
            self.ended.set_result(None)

    def on_headers_complete(self) -> None:
        """Reads the status, for the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Hands on a part of the body, for the parser."""
        if self.ended.done():
            return
        if self.status == HTTPStatus.OK:
            self._on_body(self, body)
        elif len(self.error_body) < _MOST_OF_AN_ERROR:
            self.error_body += body

    def on_message_complete(self) -> None:
        """Ends the exchange, for the parser."""
        self._is_complete = True
        # The parser forgets it behind the end.
        self._stays_open = self._parser.should_keep_alive()
        self.finish()
        self._wait_for_another()

    def _fail(self, message: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(ExchangeFailed(message))


async def exchange(
    server: Server,
    path: str,
    body: bytes | None,
    on_body: Callable[[Exchange, bytes], None],
) -> Exchange:
    """Sends a request and returns the exchange once its answer is complete.

    A connection that was idle may have been closed meanwhile; then another one is used.

    Args:
        server: where to.
        path: behind the server's prefix, such as "/v1/models".
        body: JSON to post; `None` for a GET.
        on_body: is called with the exchange and each part of the body of an answer of status 200.

    Raises:
        ExchangeFailed: the server could not be reached, or the answer broke off or was no HTTP.
    """
    request = server.request(path, body)
    while server.idle:
        protocol = Exchange(on_body)
        protocol.follow(server.idle.pop())
        try:
            await _answered(server, protocol, request)
        except ExchangeFailed:
            if not protocol.found_it_closed:
                raise
        else:
            return protocol
    protocol = await _connected(server, on_body)
    await _answered(server, protocol, request)
    return protocol


async def open_idle(server: Server, count: int) -> None:
    """Opens connections until so many are idle, for requests whose times are not to hold the set-up of one.

    Raises:
        ExchangeFailed: the server could not be reached.
    """
    for _ in range(count - len(server.idle)):
        protocol = await _connected(server, lambda _, part: None)
        protocol.stay_idle(server.idle)


async def _connected(server: Server, on_body: Callable[[Exchange, bytes], None]) -> Exchange:
    """Returns an exchange on a new connection."""
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(on_body), server.host, server.port, ssl=server.tls
        )
    except OSError as error:
        raise ExchangeFailed(
            f"cannot connect to {server.host}:{server.port}: {_reason(error)}"
        ) from error
    return protocol


async def _answered(server: Server, protocol: Exchange, request: bytes) -> None:
    """Sends a request and waits for its answer."""
    try:
        protocol.send(request)
        await protocol.ended
    finally:
        protocol.release(server.idle)


def _reason(error: OSError) -> str:
    """Returns the text of an error; asyncio's own text of a refused connection repeats the address."""
    # Numbers of TLS and of name look-ups are not those of the system.
    if error.errno is None or error.errno <= 0 or isinstance(error, ssl.SSLError):
        return str(error)
    return os.strerror(error.errno)
