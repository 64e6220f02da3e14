"""`LingeringTransport`: a transport that a client can still read from after it was closed.

Where a connection is closed before all of a request was read, the kernel answers the rest with a reset, and the client
may lose the reply. So the server first ends only what it writes, and drops what the client still sends, until the
client closes its end or a time is over (RFC 9112, section 9.6).
"""

import asyncio
from collections.abc import Callable
from typing import Any

_STATUS = b"HTTP/1.1 "


class Lingering:
    """The connections of one server that are closed for the server and still open for the client.

    Args:
        most: number of them; one more takes the place of the oldest.
        seconds: how long each stays at most.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._timers: dict[LingeringTransport, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Returns their number."""
        return len(self._timers)

    def add(self, transport: "LingeringTransport") -> None:
        """Keeps a connection open for at most `seconds`."""
        if len(self._timers) >= self._most:
            next(iter(self._timers)).close()
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(self._seconds, transport.close)

    def discard(self, transport: "LingeringTransport") -> None:
        """Forgets a connection that has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()


class LingeringTransport:
    """A wrapper with the part of a transport's interface that uvicorn's protocol uses; closing it lets it linger.

    Args:
        transport: the event loop's transport.
        others: the connections that linger.
        may_send: returns whether the client may still send some of its request.
    """

    def __init__(
        self,
        transport: Any,  # noqa: ANN401 - that of uvloop is no asyncio.Transport
        others: Lingering,
        may_send: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._others = others
        self._may_send = may_send
        self._is_closing = False
        self._status = b""
        self._loop = asyncio.get_running_loop()
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        """Sends bytes, unless the connection was closed. A status waits for what follows in its turn of the event loop.

        So a client gets it with the first event or the body, by one system call. Nothing else waits: `EngineClient`
        measures what writing tokens takes.
        """
        if self._is_closing:
            return
        if self._status:
            data, self._status = self._status + data, b""
        elif data.startswith(_STATUS):
            self._status = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Returns whether nothing more is written."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection: after a while if the client may still send, else now; a second call always now."""
        if self.is_closing() or not self._may_send():
            self._flush()
            self.lost()
            self._transport.close()
            return
        self._flush()
        self._is_closing = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._others.add(self)

    def _flush(self) -> None:
        status, self._status = self._status, b""
        if status and not self._transport.is_closing():
            self._transport.write(status)

    def lost(self) -> None:
        """Takes note that the connection has ended."""
        self._is_closing = True
        self._others.discard(self)
