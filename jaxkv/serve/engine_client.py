"""`EngineClient`: the engine process as the HTTP process sees it.

It submits calls and hands each frame of the engine to the calls with new tokens in it. What a call has not read is
kept together, so a slow reader gets many tokens at once.

Writing tokens to streams takes at most half of the event loop's time. When it takes longer than the engine needs for a
step, the tokens of several steps are written together, and new requests still have their turn.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Sequence

from jaxkv.config.plain_sampling import pack_sampling
from jaxkv.config.sampling import SamplingParams
from jaxkv.serve import exit_codes
from jaxkv.serve.wire import (
    Abort,
    Alive,
    AskStats,
    Failed,
    FrameWriter,
    FromEngine,
    PromptScored,
    Ready,
    Refused,
    StatsReply,
    StepDone,
    Submit,
    Tokens,
    WireDamaged,
    frames_from_engine,
)

MAX_UNREAD_TOKENS = 8192
"""Tokens that one call may leave unread; a reader that is further behind is aborted."""

_READ_BYTES = 2**18


class RequestRefused(ValueError):
    """The engine can never serve the request; the message is for the user."""


class EngineBusy(RuntimeError):
    """The engine could not begin the call for a reason of its own; the same request may succeed later."""


class EngineLost(RuntimeError):
    """The engine process has ended or is ending; no call of it goes on."""


class ReplicaLost(EngineLost):
    """One of several engine processes has ended, and the others go on; the message names it."""


class SlowReader(RuntimeError):
    """The call was aborted, because its reader left more than `MAX_UNREAD_TOKENS` tokens unread."""


class Call:
    """The samples of one prompt in the engine.

    Args:
        number: its number in the messages.
        samples: number of samples.
        client: submits and aborts.

    Attributes:
        prompt_logprobs: see `PromptScored`; there before the first tokens, if they were asked for.
        has_begun: whether the reader was woken for tokens.
    """

    def __init__(self, number: int, samples: int, client: "EngineClient") -> None:
        self.has_begun = False
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
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
        self._close(ending)
        self._arrived = [each for each in self._arrived if each.sample not in ending]
        self._client.end(self._number, sample if self._open else None, done=not self._open)
        self._news.set()

    # The client calls these.

    def put(self, tokens: Tokens) -> None:
        """Adds new tokens of a sample, for which `wake` wakes the reader."""
        if tokens.sample not in self._open:
            return
        self._arrived.append(tokens)
        self._unread += len(tokens.ids)
        if tokens.ended is not None:
            self._close({tokens.sample})
        if self._unread > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(SlowReader(f"{self._unread} tokens were left unread"))

    def wake(self) -> None:
        """Wakes the reader."""
        self.has_begun = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, which comes after what has arrived."""
        self._error = self._error or error
        self._close(self._open)
        self._news.set()

    def _close(self, samples: set[int]) -> None:
        """Counts samples as ended."""
        self._open = self._open - samples
        self._client.note_ended(len(samples))


class EngineClient:
    """The HTTP process's end of the socket. All methods belong to one event loop.

    Args:
        end: the connected socket.

    Attributes:
        facts: the model and the limits of the engine; `None` until it is ready.
        alive: the last sign of life.
        last_sign: the event loop's time of the last frame of any kind.
        failure: why no call goes on; `None` while the engine works.
        last_words: what the engine process wrote about its failure, for the log; empty if it wrote nothing.
        exit_code: what the engine process wrote about its exit code, see `jaxkv.serve.exit_codes`.
        on_step: called with each frame of new tokens, after the calls have them.
        replica: its name among several engine processes; empty if it is the only one.
    """

    def __init__(self, end: socket.socket) -> None:
        self.facts: Ready | None = None
        self.alive = Alive()
        self.last_sign = 0.0
        self.failure: EngineLost | None = None
        self.last_words = ""
        self.exit_code = exit_codes.FAILED
        self.on_step: Callable[[StepDone], None] | None = None
        self.replica = ""
        self._end = end
        self._writer = FrameWriter(end)
        self._frames = frames_from_engine()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, Call] = {}
        self._num_open = 0
        self._unread_calls: dict[Call, None] = {}
        self._is_pausing = False
        self._queries: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._flushing = False

    @property
    def num_open(self) -> int:
        """Number of samples in the engine."""
        return self._num_open

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last frame. The engine sends one each second, also while a step or a compilation lasts."""
        return 0.0 if self._loop is None else self._loop.time() - self.last_sign

    def start(self) -> None:
        """Begins to read the socket, on the running event loop."""
        self._end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self.last_sign = self._loop.time()
        self._loop.add_reader(self._end, self._read)

    async def ready(self) -> Ready:
        """Waits until the engine has loaded its model; returns the facts about it.

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
        self._num_open += params.n
        self._send(message)
        return call

    def note_ended(self, samples: int) -> None:
        """Counts ended samples; a call reports its own."""
        self._num_open -= samples

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
        self.lose("the server is closing", exit_codes.OK)
        self._end.close()

    def lose(self, why: str, code: int) -> None:
        """Fails all calls and refuses new ones; only the first reason counts."""
        if self.failure is not None:
            return
        named = ReplicaLost(f"{self.replica}: {why}") if self.replica else EngineLost(why)
        self.failure, self.exit_code = named, code
        if self._loop is not None:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
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
        except ConnectionError:
            return  # The engine has ended; its last messages are still to be read.
        except (OSError, WireDamaged) as error:
            self._lose_connection(error)
            return
        if self._writer.num_kept and not self._flushing and self._loop is not None:
            self._flushing = True
            self._loop.add_writer(self._end, self._flush)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except ConnectionError:
            self._stop_writing()
        except OSError as error:
            self._lose_connection(error)
        else:
            if not self._writer.num_kept:
                self._stop_writing()

    def _stop_writing(self) -> None:
        self._flushing = False
        if self._loop is not None:
            self._loop.remove_writer(self._end)

    def _read(self) -> None:
        """Takes what has arrived. The event loop calls it, so other work has its turn between two reads."""
        assert self._loop is not None, "only a running event loop reads"
        try:
            data = self._end.recv(_READ_BYTES)
            if not data:
                raise ConnectionError
            self.last_sign = self._loop.time()
            for message in self._frames.feed(data):
                self._take(message)
        except BlockingIOError:
            return
        except ConnectionError:
            self.lose("the engine process has ended", exit_codes.FAILED)
        except (OSError, WireDamaged) as error:
            self._lose_connection(error)
        except BaseException:
            # Messages behind this one are lost, and with them tokens; no call may go on without them.
            self.lose("a message of the engine process could not be handled", exit_codes.FAILED)
            raise

    def _lose_connection(self, error: Exception) -> None:
        self.last_words = f"the connection to the engine process is damaged: {error}"
        self.lose("the connection to the engine process is damaged", exit_codes.FAILED)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepDone(tokens):
                self._deliver(tokens)
                if self.on_step is not None:
                    self.on_step(message)
            case Refused(call=number, message=text, kind=kind):
                if (call := self._calls.pop(number, None)) is not None:
                    call.fail(RequestRefused(text) if kind == "request" else EngineBusy(text))
            case PromptScored(number, logprobs):
                if (call := self._calls.get(number)) is not None:
                    call.prompt_logprobs = logprobs
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
                self.last_words = text
                self.lose("the engine process has failed", code)

    def _deliver(self, tokens: Sequence[Tokens]) -> None:
        """Gives calls their tokens, and wakes the readers now or at the end of a pause; for first tokens always now."""
        for each in tokens:
            call = self._calls.get(each.call)
            if call is None:
                continue
            call.put(each)
            if call.has_begun:
                self._unread_calls[call] = None
            else:
                call.wake()
            if not call.is_open:
                self._calls.pop(each.call, None)
        if not self._is_pausing:
            self._wake()

    def _wake(self) -> None:
        """Wakes the readers of new tokens, and pauses for as long as this thread then computes."""
        self._is_pausing = bool(self._unread_calls)
        if not self._unread_calls:
            return
        for call in self._unread_calls:
            call.wake()
        self._unread_calls.clear()
        assert self._loop is not None, "only a running event loop reads"
        # The event loop runs the readers, which are waiting, before this.
        self._loop.call_soon(self._pause, time.thread_time())

    def _pause(self, began: float) -> None:
        assert self._loop is not None, "only a running event loop reads"
        self._loop.call_later(time.thread_time() - began, self._wake)
