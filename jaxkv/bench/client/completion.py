"""One request of an OpenAI API: its body, and its streamed answer read into a timeline."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from jaxkv.bench.client.event_stream import EventStream
from jaxkv.bench.client.http_exchange import Exchange, ExchangeFailed, Server, exchange
from jaxkv.bench.figures import Timeline
from jaxkv.wording import clip

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""Endpoint -> its path."""

type Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, token ids (completions alone), or the messages of a chat (chat alone)."""

_FAILURES = ("error", "abort")
"""Finish reasons of answers that are not whole."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """The endpoint of a server, and what all requests have in common.

    Attributes:
        server: where it is.
        model: name of the model.
        endpoint: a name of `PATHS`.
        temperature: temperature of sampling; 0 is greedy.
        ignore_eos: whether the server is asked to go on after the model's end of text, with the `ignore_eos` of vLLM
            and jaxkv.
        timeout: most seconds of a request, from its sending to its end.

    Raises:
        ValueError: the endpoint is unknown, or the time is not above 0.
    """

    server: Server
    model: str
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Checks the endpoint and the time."""
        if self.endpoint not in PATHS:
            raise ValueError(f"endpoint must be one of {', '.join(PATHS)}, got {self.endpoint!r}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"the time-out must be above 0 seconds, got {self.timeout}")

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """Returns the JSON of a request.

        Raises:
            ValueError: the endpoint takes no such prompt.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "completions":
            if not isinstance(prompt, str) and isinstance(prompt[0], dict):
                raise ValueError("messages need the endpoint chat")
            body["prompt"] = prompt
        elif isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt[0], int):
            raise ValueError("prompts of token ids need the endpoint completions")
        else:
            body["messages"] = prompt
        return msgspec.json.encode(body)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        )


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Answer:
    """Reads a streamed answer into a timeline.

    An event with text, reasoning or a part of a tool call counts as tokens; the first event of a chat, which has a role
    alone, does not.

    Attributes:
        timeline: timeline of the request.
        counted: whether the server sent its counts of tokens; without them each event is one token.
    """

    def __init__(self, timeline: Timeline, clock: Callable[[], float]) -> None:
        """Takes the timeline to fill, and its clock."""
        self.timeline = timeline
        self.counted = False
        self._clock = clock
        self._events = EventStream()
        self._complete = False

    def feed(self, sent: Exchange, part: bytes) -> None:
        """Reads a part of the stream; all that it completes has the time of now."""
        now = self._clock()
        for payload in self._events.feed(part):
            if payload == b"[DONE]":
                self._complete = True
                sent.finish()
                return
            try:
                chunk = _CHUNKS.decode(payload)
            except msgspec.DecodeError as error:
                self.fail(f"an event is not of this API ({error}): {_text(payload)}")
                sent.finish()
                return
            if chunk.error and bytes(chunk.error) != b"null":
                self.fail(f"error in the stream: {_text(payload)}")
                sent.finish()
                return
            self._read(chunk, now)

    def _read(self, chunk: _Chunk, now: float) -> None:
        timeline = self.timeline
        for choice in chunk.choices:
            if choice.has_tokens:
                timeline.tokens.append(now)
            if choice.finish_reason is not None:
                timeline.ended = now
                if choice.finish_reason in _FAILURES:
                    self.fail(f"the answer ended with finish_reason {choice.finish_reason!r}")
        if chunk.usage is not None:
            self.counted = chunk.usage.completion_tokens is not None
            timeline.prompt_tokens = chunk.usage.prompt_tokens
            timeline.generated = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            timeline.cached_tokens = (details and details.cached_tokens) or 0

    def end(self) -> None:
        """Judges the answer once the connection has ended."""
        timeline = self.timeline
        if timeline.failed:
            return
        if not self._complete:
            self.fail(f"the stream ended without [DONE], after {len(timeline.tokens)} events")
        elif timeline.ended is None:
            self.fail("the stream ended without a finish_reason")
        elif not timeline.tokens and timeline.generated:
            # Tokens without text of their own, such as parts of a character.
            timeline.tokens.append(timeline.ended)
        elif not timeline.tokens:
            self.fail("the answer has no token")

    def fail(self, message: str) -> None:
        """Marks the request as failed."""
        self.timeline.failed = True
        self.timeline.error = clip(message)


async def complete(api: Api, body: bytes, timeline: Timeline, clock: Callable[[], float]) -> Answer:
    """Sends a request and reads its answer into the timeline, which also takes any failure.

    Args:
        api: the endpoint.
        body: the body of the request, from `Api.body`.
        timeline: timeline of the request.
        clock: returns the timeline's seconds.
    """
    answer = Answer(timeline, clock)
    try:
        async with asyncio.timeout(api.timeout):
            sent = await exchange(api.server, PATHS[api.endpoint], body, answer.feed)
    except TimeoutError:
        answer.fail(f"timed out after {api.timeout:g} s")
    except ExchangeFailed as error:
        answer.fail(str(error))
    else:
        if sent.status != HTTPStatus.OK:
            answer.fail(status_error(sent))
        answer.end()
    return answer


def status_error(sent: Exchange) -> str:
    """Returns what an answer other than 200 says, such as "429 Too Many Requests: the queue is full"."""
    try:
        phrase = f" {HTTPStatus(sent.status).phrase}"
    except ValueError:
        phrase = ""
    message = _text(sent.error_body)
    return f"{sent.status}{phrase}{': ' if message else ''}{message}"


def _text(payload: bytes) -> str:
    """Returns the message of an error in OpenAI's format, or else the text itself."""
    try:
        found = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return clip(payload.decode(errors="replace"))
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if key in found), None)
    return clip(found if isinstance(found, str) else payload.decode(errors="replace"))
