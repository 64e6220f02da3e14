"""`Inbox`: the engine process's end of the socket, as its main thread reads it between two steps."""

import select
import socket
import time
from collections import deque

from jaxkv.serve.wire import Frames, ToEngine, frames_to_engine

_READ_BYTES = 2**18


class Inbox:
    """The messages of the HTTP process, in order. One thread reads; any thread may call `wake` and `peer_is_gone`.

    Args:
        end: the socket.

    Attributes:
        end: the socket.
        is_closed: whether the stream has ended; all its messages were taken.
        busy_seconds: how long `wait` keeps a core busy before it sleeps. To wake a thread that sleeps takes tens of
            microseconds, and its first instructions take longer than usual.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.is_closed = False
        self.busy_seconds = 0.0
        self._frames: Frames[ToEngine] = frames_to_engine()
        self._arrived: deque[ToEngine] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def first(self) -> ToEngine | None:
        """Waits for the first message; returns `None` if the stream ends before. Those behind it are kept.

        Raises:
            OSError: the connection is damaged.
            WireDamaged: the stream holds no messages.
        """
        while not self._arrived:
            if not self._read():
                return None
        return self._arrived.popleft()

    def take(self) -> list[ToEngine]:
        """Returns all messages that have arrived, and waits for none.

        Raises:
            OSError: the connection is damaged.
            WireDamaged: the stream holds no messages.
        """
        while not self.is_closed:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        taken = list(self._arrived)
        self._arrived.clear()
        return taken

    def wait(self, *, writable: bool = False) -> None:
        """Waits until there is something to take, until the stream ends, or until `wake`.

        Args:
            writable: also end when the socket takes bytes.
        """
        if self._arrived or self.is_closed:
            return
        poll = select.poll()
        poll.register(self.end, select.POLLIN | (select.POLLOUT if writable else 0))
        poll.register(self._woken, select.POLLIN)
        latest = time.monotonic() + self.busy_seconds
        while not poll.poll(0):
            if time.monotonic() >= latest:
                poll.poll()
                break
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            return

    def wake(self) -> None:
        """Ends a `wait`, or the next one."""
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # So many bytes wait already that the next `wait` ends.

    def peer_is_gone(self, seconds: float = 0.0) -> bool:
        """Returns whether the other end is closed, whether or not there is something to take.

        Args:
            seconds: how long to wait for that.
        """
        # Without flags it reports only that the other end is closed.
        poll = select.poll()
        poll.register(self.end, 0)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Closes the socket, which the other end sees as the end of this process."""
        for each in (self.end, self._woken, self._waker):
            each.close()

    def _read(self, flags: int = 0) -> bool:
        """Reads once; returns False at the end of the stream."""
        try:
            data = self.end.recv(_READ_BYTES, flags)
        except ConnectionResetError:
            # How a Unix socket reports that the other end was closed with unread bytes in it.
            data = b""
        self.is_closed = not data
        self._arrived += self._frames.feed(data)
        return not self.is_closed
