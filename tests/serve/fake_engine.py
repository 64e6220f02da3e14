"""An engine process without a model, for tests of the HTTP process: it answers in the same messages, in the same loop.

It "generates" what a script says for each call, so that tests choose texts, delays and failures.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from jaxkv import default_model
from jaxkv.serve.engine_client import EngineClient
from jaxkv.serve.wire import (
    Abort,
    AskStats,
    Ended,
    FromEngine,
    PromptScored,
    Ready,
    Refused,
    StatsReply,
    StepDone,
    Submit,
    Tokens,
    frame,
    frames_to_engine,
)
from tests.serve.pictures import fake_stats

FACTS = Ready(
    directory=str(default_model.path()),
    max_model_len=1024,
    vocab_size=4096,
    max_sequences=8,
    eos_ids=(0,),
    model_type="llama",
)


class FakeEngine:
    """The engine's end of a socket.

    Args:
        script: returns the token ids of a call's samples; a `str` instead refuses the call with this message. If not
            given, every sample echoes its prompt.
        held: if set, tokens come only when the test calls `step`.

    Attributes:
        calls: every `Submit` that came, by number.
        aborted: every `Abort` that came.
        stats, picture: what it answers to `AskStats`.
        questions: every `AskStats` that came.
        answers_stats: whether it answers them.
    """

    def __init__(
        self,
        script: Callable[[Submit], Iterable[int] | str] | None = None,
        *,
        held: bool = False,
        facts: Ready = FACTS,
    ) -> None:
        self.calls: dict[int, Submit] = {}
        self.aborted: list[Abort] = []
        stats, self.picture = fake_stats()
        self.stats: dict[str, object] = {**stats, "running": 0, "waiting": 0}
        self.questions: list[AskStats] = []
        self.answers_stats = True
        self._script = script or (lambda submit: submit.ids)
        self._held = held
        self._facts = facts
        self._left: dict[tuple[int, int], list[int]] = {}
        self._produced: dict[tuple[int, int], int] = {}
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.client = EngineClient(self._theirs)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> EngineClient:
        """Begins to serve; returns the client, which is ready."""
        self.client.start()
        self._task = asyncio.create_task(self._serve())
        await self.send(self._facts)
        await self.client.ready()
        return self.client

    async def send(self, message: FromEngine) -> None:
        """Sends any message."""
        await asyncio.get_running_loop().sock_sendall(self._ours, frame(message))

    async def die(self) -> None:
        """Closes the socket, as a process does that is killed."""
        await self._end()

    async def close(self) -> None:
        """Ends both ends."""
        await self._end()
        await self.client.close()

    @property
    def running(self) -> set[tuple[int, int]]:
        """(call, sample) of what has tokens left."""
        return set(self._left)

    async def step(self) -> None:
        """Sends one token of every sample that has one left, in one frame."""
        new = []
        for (call, sample), ids in list(self._left.items()):
            most = self.calls[call].sampling.get("max_tokens", 16)
            token, done = ids.pop(0), not ids
            produced = self._produced[call, sample] = self._produced.get((call, sample), 0) + 1
            reason = "length" if produced == most else "stop" if done else None
            logprobs = None
            if self.calls[call].sampling.get("logprobs") is not None:
                logprobs = [{token: -0.5, (token + 1) % 4096: -1.0}]
            end = None if reason is None else Ended(reason, None, 0, 0, 0.0)
            if end is not None:
                del self._left[call, sample]
            new.append(Tokens(call, sample, [token], logprobs, end))
        if new:
            await self.send(StepDone(new))

    async def fail(self, call: int, error: str, code: str) -> None:
        """Ends the first sample of a call with an error."""
        del self._left[call, 0]
        end = Ended("error", error, 0, 0, 0.0, code)
        await self.send(StepDone([Tokens(call, 0, [], None, end)]))

    async def _serve(self) -> None:
        loop, frames = asyncio.get_running_loop(), frames_to_engine()
        while data := await loop.sock_recv(self._ours, 2**16):
            for message in frames.feed(data):
                await self._take(message)
            while self._left and not self._held:
                await self.step()
                await asyncio.sleep(0)

    async def _take(self, message: object) -> None:
        match message:
            case Submit(call=call):
                self.calls[call] = message
                answer = self._script(message)
                if isinstance(answer, str):
                    await self.send(Refused(call, answer))
                    return
                if message.sampling.get("prompt_logprobs") is not None:
                    scores = [{token: -0.25, (token + 1) % 4096: -2.0} for token in message.ids]
                    await self.send(PromptScored(call, [None, *scores[1:]]))
                for sample in range(message.sampling.get("n", 1)):
                    self._left[call, sample] = list(answer)
            case Abort(call, sample):
                self.aborted.append(message)
                for key in list(self._left):
                    if key[0] == call and sample in (None, key[1]):
                        del self._left[key]
            case AskStats(query, pages):
                self.questions.append(message)
                if self.answers_stats:
                    stats = self.stats | (self.picture if pages else {})
                    await self.send(StatsReply(query, stats))

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._ours.close()


@asynccontextmanager
async def fake_engine(*given, **options) -> AsyncIterator[FakeEngine]:
    """Yields a fake engine whose client is ready, and closes it."""
    fake = FakeEngine(*given, **options)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.close()
