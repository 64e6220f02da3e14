"""Server-sent events: the payloads of a stream of bytes that comes in parts of any size."""

import re

_ENDS = re.compile(rb"\r?\n\r?\n")


class EventStream:
    """Cuts a stream into events and returns their payloads; comments, ids and names of events are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[bytes]:
        """Returns the payload of each event that this part completes; lines of one event are joined by newlines."""
        *events, self._rest = _ENDS.split(self._rest + part if self._rest else part)
        return [payload for event in events if (payload := _payload(event)) is not None]


def _payload(event: bytes) -> bytes | None:
    # Nearly all events are one line of data.
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    data = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(data) if data else None
