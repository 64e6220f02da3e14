"""`Channel`: values over a stream socket, in frames. One thread reads; any thread may write."""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

from jaxkv.links.values import Buffer, Values

KEY_BYTES = 32
_NUMBER_BYTES = 8
_MOST_BUFFERS = 2**20
_SILENCE_SECONDS = 5
_SILENT_PROBES = 3
"""A host that answers none of the probes, which the kernel sends every few seconds, counts as gone."""


class Channel:
    """One end of a connection between two processes.

    Args:
        end: a connected stream socket, which the channel owns.
        values: writes and reads the values; the other end has equal ones.
    """

    def __init__(self, end: socket.socket, values: Values) -> None:
        self._end = end
        self._values = values
        self._writing = threading.Lock()

    def send(self, *message: object) -> None:
        """Sends values; waits while the other end reads too slowly.

        Raises:
            ValueError: a value cannot be written; nothing was sent.
            OSError: the other end is closed.
        """
        self.send_written(self._values.write(list(message)))

    def send_written(self, buffers: Sequence[Buffer]) -> None:
        """Sends what `Values.write` returned for the list of a message; several channels may send the same.

        Raises:
            OSError: the other end is closed.
        """
        sizes = [len(buffers), *map(len, buffers)]
        head = b"".join(size.to_bytes(_NUMBER_BYTES, "little") for size in sizes)
        small = all(len(buffer) < 2**16 for buffer in buffers)
        with self._writing:
            if small:
                self._end.sendall(b"".join([head, *buffers]))
                return
            self._end.sendall(head)
            for buffer in buffers:
                self._end.sendall(buffer)

    def receive(self) -> list[Any] | None:
        """Waits for the next message; `None` when the other end is closed or its process is gone.

        Raises:
            ValueError: the message is damaged.
        """
        try:
            [count] = self._numbers(1)
            if not 1 <= count <= _MOST_BUFFERS:
                raise ValueError(f"a message of {count} parts is damaged")
            buffers: Sequence[Buffer] = [self._bytes(size) for size in self._numbers(count)]
        except (EOFError, OSError):
            return None
        return self._values.read(buffers)

    def close(self) -> None:
        """Closes the connection, which ends `receive` on both ends. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _numbers(self, count: int) -> list[int]:
        data = self._bytes(count * _NUMBER_BYTES)
        return [
            int.from_bytes(data[at : at + _NUMBER_BYTES], "little")
            for at in range(0, len(data), _NUMBER_BYTES)
        ]

    def _bytes(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        read = 0
        while read < size:
            count = self._end.recv_into(data[read:])
            if not count:
                raise EOFError
            read += count
        return data


def channel_of_descriptor(number: int, values: Values) -> Channel:
    """Returns the channel of a socket that this process has inherited."""
    return Channel(socket.socket(fileno=number), values)


def child_channel(values: Values) -> tuple[Channel, socket.socket]:
    """Returns a channel and the socket of its other end, for a child process; close that one once the child has it."""
    ours, theirs = socket.socketpair()
    return Channel(ours, values), theirs


class Listener:
    """Takes connections of other hosts that know its key, on all addresses of this host.

    Attributes:
        port: its port, a free one.
        key: what the others send first.
    """

    def __init__(self) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._socket = socket.create_server(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self.key = secrets.token_bytes(KEY_BYTES)

    def accept(self, count: int, values: Values, *, seconds: float) -> list[Channel]:
        """Returns the channels of `count` processes that have sent the key; others are hung up on.

        Raises:
            TimeoutError: they did not come in time.
        """
        self._socket.settimeout(seconds)
        found: list[Channel] = []
        while len(found) < count:
            end, _ = self._socket.accept()
            end.settimeout(seconds)
            with contextlib.suppress(OSError):
                given = end.recv(len(self.key), socket.MSG_WAITALL)
                if secrets.compare_digest(given, self.key):
                    end.settimeout(None)
                    found.append(Channel(_kept_alive(end), values))
                    continue
            end.close()
        return found

    def close(self) -> None:
        """Takes no further connection."""
        self._socket.close()


def connect(address: tuple[str, int], key: bytes, values: Values, *, seconds: float) -> Channel:
    """Returns a channel to a `Listener` on another host.

    Raises:
        OSError: it cannot be reached.
    """
    end = socket.create_connection(address, timeout=seconds)
    end.settimeout(None)
    end.sendall(key)
    return Channel(_kept_alive(end), values)


def host_name() -> str:
    """Returns the name of this host and the id of this process, for messages."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def _kept_alive(end: socket.socket) -> socket.socket:
    """Lets the kernel find out within seconds that the other host is gone; sends small messages at once."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_PROBES)
    # Bytes that are not acknowledged count too, while the keep-alive waits for silence.
    end.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS * _SILENT_PROBES
    )
    return end
