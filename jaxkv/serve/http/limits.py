"""`Limits`: bounds on connections, requests and times, for one client and for all clients together."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on requests and connections. Each is a positive number.

    Attributes:
        most_waiting: samples (`n` for each prompt) beyond the engine's `max_sequences`; one more is answered 429.
        retry_after_seconds: time after which clients may try again, in the replies 429 and 503.
        request_seconds: a request that takes longer ends with 504, or with an error event in its stream.
        body_bytes: longest body; a longer one is answered 413.
        head_bytes: longest request line and headers together; longer ones are answered 431.
        headers: most headers; more are answered 431.
        head_seconds: most from the first byte of a connection or request to the end of its headers; later is 408.
        body_seconds: most from the end of the headers to the end of the body; later is 408.
        write_seconds: a client that reads nothing of its reply for this time is disconnected.
        idle_seconds: a connection without a request for this time is closed.
        connections: most open connections; one more is answered 503 and closed.
        linger_seconds: how long a connection that is closed before all of a request was read stays open, so that its
            client can read the reply.
        lingering: most such connections, beside the others.
        json_depth: deepest nesting of a body.
        prompts: most prompts of one request, times `n`.
        keep_alive_seconds: a stream without an event for this time gets a comment line.
        threads: most threads that tokenize and render templates.
        silence_seconds: if the engine has sent nothing for this time, `/health` answers 503.
    """

    most_waiting: int = 1024
    retry_after_seconds: int = 1
    request_seconds: float = 3600.0
    body_bytes: int = 8 * 2**20
    head_bytes: int = 32 * 2**10
    headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 30.0
    idle_seconds: float = 30.0
    connections: int = 4096
    linger_seconds: float = 2.0
    lingering: int = 1024
    json_depth: int = 128
    prompts: int = 256
    keep_alive_seconds: float = 15.0
    threads: int = 4
    silence_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Raises `ValueError` for a bound that is not positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{field.name} must be a positive number, got {value!r}")
