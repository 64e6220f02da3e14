"""`EngineClient`: the engine process as the HTTP process sees it.

It submits calls and hands each frame of the engine to the calls with new tokens in it. What a call has not read is
kept together, so a slow reader gets many tokens at once.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Sequence

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.wire import (
    Abort,
    Alive,
    AskStats,
    Failed,
    FrameWriter,
    FromEngine,
    Ready,
    Refused,
    StatsReply,
    StepDone,
    Submit,
    Tokens,
    WireDamaged,
    frames_from_engine,
    pack_sampling,
)

_LOG = logging.getLogger(__name__)

MAX_UNREAD_TOKENS = 8192
"""Tokens that one call may leave unread; a reader that is further behind is aborted."""

_READ_BYTES = 2**18


class RequestRefused(ValueError):
    """The engine can never serve the request; the message is for the user."""


class EngineBusy(RuntimeError):
    """The engine could not begin the call for a reason of its own; the same request may succeed later."""


class EngineLost(RuntimeError):
    """The engine process has ended or is ending; no call of it goes on."""


class SlowReader(RuntimeError):
    """The call was aborted, because its reader left more than `MAX_UNREAD_TOKENS` tokens unread."""


class Call:
    """The samples of one prompt in the engine.

    Args:
        number: its number in the messages.
        samples: number of samples.
        client: submits and aborts.
    """

    def __init__(self, number: int, samples: int, client: "EngineClient") -> None:
        self._number = number
        self._client = client
        self._open = set(range(samples))
        self._arrived: list[Tokens] = []
        self._unread = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a sample may still bring tokens."""
        return bool(self._open) and self._error is None

    async def arrivals(self) -> list[Tokens]:
        """Waits for tokens; returns all that came since the last call, in order. Empty if all samples have ended.

        Raises:
            RequestRefused: the engine can never serve the request.
            EngineBusy: the engine could not begin it.
            SlowReader: too many tokens were left unread.
            EngineLost: the engine process has ended.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._news.clear()
            await self._news.wait()
        arrived, self._arrived, self._unread = self._arrived, [], 0
        return arrived

    def abort(self, sample: int | None = None) -> None:
        """Ends a sample, or all of them, and drops what else comes of it. A second call does nothing."""
        ending = self._open if sample is None else self._open & {sample}
        if not ending:
            return
        self._open = self._open - ending
        self._arrived = [each for each in self._arrived if each.sample not in ending]
        self._client.end(self._number, sample if self._open else None, done=not self._open)
        self._news.set()

    # The client calls these.

    def put(self, tokens: Tokens) -> None:
        """Adds new tokens of a sample."""
        if tokens.sample not in self._open:
            return
        self._arrived.append(tokens)
        self._unread += len(tokens.ids)
        if tokens.ended is not None:
            self._open = self._open - {tokens.sample}
        self._news.set()
        if self._unread > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(SlowReader(f"{self._unread} tokens were left unread"))

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, which comes after what has arrived."""
        self._error = self._error or error
        self._news.set()


class EngineClient:
    """The HTTP process's end of the socket. All methods belong to one event loop.

    Args:
        end: the connected socket.

    Attributes:
        facts: what the engine told about its model; `None` until it is ready.
        alive: the last sign of life.
        last_sign: the event loop's time of the last frame of any kind.
        failure: why no call goes on; `None` while the engine works.
    """

    def __init__(self, end: socket.socket) -> None:
        self.facts: Ready | None = None
        self.alive = Alive(0.0)
        self.last_sign = 0.0
        self.failure: EngineLost | None = None
        self.exit_code = 1
        self.on_step: Callable[[StepDone], None] | None = None
        self._end = end
        self._writer = FrameWriter(end)
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._queries: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._flushing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Number of calls in the engine."""
        return len(self._calls)

    def start(self) -> None:
        """Begins to read the socket, on the running event loop."""
        self._end.setblocking(False)
        self.last_sign = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._read(), name="engine frames")

    async def ready(self) -> Ready:
        """Waits until the engine has loaded its model; returns what it told.

        Raises:
            EngineLost: it has ended instead.
        """
        await self._ready.wait()
        if self.facts is None:
            raise self.failure or EngineLost("the engine process has ended")
        return self.facts

    async def wait_lost(self) -> EngineLost:
        """Waits until the engine is lost; returns why."""
        await self._lost.wait()
        return self.failure or EngineLost("the engine process has ended")

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes | None = None,
    ) -> Call:
        """Begins all samples of one prompt.

        Args:
            ids: token ids of the prompt.
            params: sampling parameters without `stop` and `bad_words`, which are texts.
            priority: lower numbers are served first.
            salt: only requests of the same salt share cached pages.

        Raises:
            EngineLost: the engine process has ended.
        """
        texts = (*params.stop, *params.bad_words)
        assert not texts, f"the HTTP process alone knows texts, got {texts}"
        if self.failure is not None:
            raise self.failure
        number = next(self._numbers)
        call = Call(number, params.n, self)
        message = Submit(
            call=number,
            ids=list(ids),
            sampling=pack_sampling(params),
            priority=priority,
            salt=salt,
        )
        self._calls[number] = call
        self._send(message)
        return call

    def end(self, number: int, sample: int | None, *, done: bool) -> None:
        """Aborts a sample of a call, or the whole call; `Call.abort` calls this."""
        if done:
            self._calls.pop(number, None)
        self._send(Abort(number, sample))

    async def stats(self, *, pages: bool = False) -> dict[str, object]:
        """Returns the engine's statistics, see `StatsReply`.

        Args:
            pages: also the holder of each page and state.

        Raises:
            EngineLost: the engine process has ended.
        """
        if self.failure is not None:
            raise self.failure
        query = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            self._send(AskStats(query, pages))
            return await answer
        finally:
            self._queries.pop(query, None)

    async def close(self) -> None:
        """Closes the socket, which ends the engine process; calls in progress raise `EngineLost`."""
        self.lose("the server is closing", self.exit_code)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end.close()

    def lose(self, why: str, code: int) -> None:
        """Fails all calls and refuses new ones; only the first reason counts."""
        if self.failure is not None:
            return
        self.failure, self.exit_code = EngineLost(why), code
        for call in self._calls.values():
            call.fail(self.failure)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(self.failure)
        self._calls.clear()
        self._ready.set()
        self._lost.set()

    def _send(self, message: Submit | Abort | AskStats) -> None:
        if self.failure is not None:
            return
        try:
            self._writer.write(message)
        except (OSError, WireDamaged) as error:
            self.lose(f"the engine process does not read: {error}", 1)
            return
        if self._writer.num_kept and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().add_writer(self._end, self._flush)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError as error:
            self.lose(f"the engine process does not read: {error}", 1)
        if self.failure is not None or not self._writer.num_kept:
            self._flushing = False
            asyncio.get_running_loop().remove_writer(self._end)

    async def _read(self) -> None:
        loop, frames = asyncio.get_running_loop(), frames_from_engine()
        try:
            while data := await loop.sock_recv(self._end, _READ_BYTES):
                self.last_sign = loop.time()
                for message in frames.feed(data):
                    self._take(message)
            self.lose("the engine process has ended", 1)
        except (OSError, WireDamaged) as error:
            _LOG.error("the connection to the engine process is damaged: %s", error)
            self.lose("the connection to the engine process is damaged", 1)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepDone(tokens):
                self._deliver(tokens)
                if self.on_step is not None:
                    self.on_step(message)
            case Refused(call=number, message=text, kind=kind):
                if (call := self._calls.pop(number, None)) is not None:
                    call.fail(RequestRefused(text) if kind == "request" else EngineBusy(text))
            case Alive():
                self.alive = message
            case StatsReply(query, stats):
                answer = self._queries.get(query)
                if answer is not None and not answer.done():
                    answer.set_result(stats)
            case Ready():
                self.facts = message
                self._ready.set()
            case Failed(text, code):
                _LOG.error("the engine process ends: %s", text)
                self.lose("the engine process has failed", code)

    def _deliver(self, tokens: Sequence[Tokens]) -> None:
        for each in tokens:
            call = self._calls.get(each.call)
            if call is None:
                continue
            call.put(each)
            if not call.is_open:
                self._calls.pop(each.call, None)
