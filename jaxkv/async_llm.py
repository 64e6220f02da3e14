"""`AsyncLLM`: concurrent requests of asyncio callers, served by one engine in a thread of its own.

Callers put commands (begin a request, abort it, close) into a queue. The engine's thread runs them between two steps,
and posts each generated piece to the event loop of its caller. No event loop waits for the device.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.sharding import Sharding

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.command_loop import CommandLoop
from jaxkv.engine.drive import output_of, with_figures
from jaxkv.engine.recovery import is_fatal
from jaxkv.engine.request import Piece, Request, RequestOutput
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.errors import STEP_FAILURES, OutOfPages, OutOfStates
from jaxkv.given_samples import Outputs, by_adapter
from jaxkv.llm import LLM
from jaxkv.models.protocol import Params
from jaxkv.replicas.async_front import AsyncReplicatedLLM
from jaxkv.replicas.front import ReplicatedLLM
from jaxkv.rollout import Rollout, rollout_of
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.text.prompts import Prompt, as_call, one_each, one_sample

_LOG = logging.getLogger(__name__)

_Arrival = tuple[int, Piece] | BaseException | None
_ENDED = "the engine has failed or was closed"


@dataclass(eq=False)
class _Call:
    """One call of `stream` or `generate`, shared by the caller's event loop and the engine's thread.

    Attributes:
        requests: one request per sample.
        loop: the caller's event loop.
        streamed: the caller reads pieces; any other call only hears of its end, since pieces take more time per token
            than the engine.
        arrivals: of a streamed call (sample number, piece) for each new piece, otherwise `None` when all samples have
            ended; or the error that ends the call.
        samples: the engine's states of the requests; empty until the engine has accepted them.
        left: the caller does not wait any more.
    """

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    streamed: bool = False
    arrivals: asyncio.Queue[_Arrival] = field(default_factory=asyncio.Queue)
    samples: list[RequestState] = field(default_factory=list)
    left: bool = False

    def send(self, arrivals: Sequence[_Arrival]) -> bool:
        """Posts arrivals to the caller's event loop, from the engine's thread; returns False if that loop is closed."""
        if not arrivals:
            return not self.loop.is_closed()
        try:
            self.loop.call_soon_threadsafe(self._put, arrivals)
        except RuntimeError:  # The event loop is closed.
            return False
        return True

    def _put(self, arrivals: Sequence[_Arrival]) -> None:
        for arrival in arrivals:
            self.arrivals.put_nowait(arrival)


class AsyncLLM:
    """Serves concurrent asyncio callers with one `LLM`. Until it is closed, calls of the `LLM` itself are refused.

    Examples:
        >>> async with AsyncLLM(LLM()) as served:
        ...     async for piece in served.stream("def ", SamplingParams(max_tokens=64)):
        ...         print(piece.text, end="")

    Args:
        llm: the model to serve, with its `EngineConfig`; of replicas, an `AsyncReplicatedLLM` with these
            methods is made.

    Raises:
        ValueError: `llm` is no `LLM`.
        RuntimeError: another `AsyncLLM` serves it, or another thread is in the middle of a call to it.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ValueError(f"llm must be an LLM, such as AsyncLLM(LLM(...)), got {llm!r}")
        llm.lock.lend()
        self._llm = llm
        self._engine = llm.engine
        self._loop = CommandLoop(self._engine, llm.lock, self._deliver)
        self._calls: list[_Call] = []
        # Those that the engine has neither accepted nor refused yet.
        self._queued: set[_Call] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._submit_lock = threading.Lock()
        # A daemon, so that a program that never closes it can end.
        self._thread = threading.Thread(target=self._serve, name="jaxkv-engine", daemon=True)
        self._thread.start()

    # Hidden from type checkers, for which an `AsyncLLM` is an `AsyncLLM`.
    if not TYPE_CHECKING:

        def __new__(cls, llm):  # noqa: ANN001, ANN204
            """Returns a new `AsyncLLM`; of replicas, an object with its methods."""
            is_replicated = isinstance(llm, ReplicatedLLM)
            return AsyncReplicatedLLM(llm) if is_replicated else super().__new__(cls)

        __new__.__signature__ = inspect.signature(__init__)

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        await self.close()

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the engine; `None` while it works."""
        return self._failure

    async def close(self) -> None:
        """Aborts all requests and ends the thread. A second call does nothing."""
        self._loop.end()
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
        **options: object,
    ) -> AsyncGenerator[Piece, None]:
        """Yields pieces of text as they are generated. Closing or collecting the generator early aborts the request.

        A `break` out of the loop does not close the generator while a name refers to it. To abort at once, use
        `async with contextlib.aclosing(served.stream(...)) as pieces`.

        Args:
            prompt: one prompt in any form that `LLM.generate` takes.
            sampling: how tokens are chosen; one sample.
            priority: lower numbers are served first.
            salt: only requests of the same salt share cached pages; give each tenant one.
            options: fields of `SamplingParams` in place of `sampling`, and vLLM's names `sampling_params` and
                `cache_salt`.

        Raises:
            ValueError: the prompt, the parameters, `priority` or `salt` cannot be served.
            ProgramRefused: strict mode has no program for it.
            RuntimeError: the engine has failed or was closed.
            Exception: the error of the request, if its own part of a step failed.
        """
        given = as_call("AsyncLLM.stream", options, sampling=sampling, salt=salt)
        params = one_sample(given["sampling"])
        call = await self._submit(prompt, params, priority, given["salt"], streamed=True)
        try:
            while True:
                _, piece = await self._next(call)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._loop.put(lambda: self._abort(call))

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
        **options: object,
    ) -> RequestOutput:
        """Returns all samples of one prompt when they have ended. Cancelling the call aborts them.

        Args and errors are those of `stream`, but `n` may be above 1.
        """
        given = as_call("AsyncLLM.generate", options, sampling=sampling, salt=salt)
        [params] = one_each(given["sampling"], 1)
        call = await self._submit(prompt, params, priority, given["salt"])
        await self._ends_of([call])
        for sample in call.samples:
            if sample.reason == "error" and sample.error is not None:
                raise sample.error
        return output_of(call.samples, self._llm.tokenizer)

    async def rollout(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_width: int | None = None,
        output_width: int | None = None,
        pad_id: int = 0,
        device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
        priority: int = 0,
        salt: str | bytes | None = None,
        **options: object,
    ) -> Rollout:
        """Generates all samples of some prompts, beside other callers, and returns them as padded arrays.

        Weights may be updated meanwhile; `Rollout.weight_versions` has the version of each token. All prompts are
        checked before any is queued. Cancelling the call aborts its requests.

        Args:
            prompts: as for `LLM.rollout`, like all that is not listed.
            sampling: sampling parameters, for all prompts or one for each.
            prompt_width: columns of prompts.
            output_width: columns of outputs.
            pad_id: fills the columns that have no token.
            device: a device or sharding for the arrays.
            priority: as for `stream`.
            salt: as for `stream`.
            options: as for `stream`.

        Raises:
            ValueError, ProgramRefused: as for `LLM.rollout`.
            OutOfPages, OutOfStates: no request runs, and `prompt_logprobs` need more pages than are free.
            RuntimeError: the engine has failed or was closed.
        """
        given = as_call("AsyncLLM.rollout", options, sampling=sampling, salt=salt)
        requests, output_width = await asyncio.to_thread(
            self._llm.rollout_requests,
            prompts,
            given["sampling"],
            prompt_width=prompt_width,
            output_width=output_width,
            priority=priority,
            salt=given["salt"],
        )
        made = rollout_of(
            await self.outputs_of(requests),
            prompt_width=prompt_width,
            output_width=output_width,
            pad_id=pad_id,
        )
        return made if device is None else made.to(device)

    async def outputs_of(self, requests: Sequence[list[Request]]) -> list[RequestOutput]:
        """Runs requests of `LLM.requests`, beside other callers; returns the output of each prompt.

        A request that failed has the `finish_reason` "error". Cancelling the call aborts its requests.

        Args:
            requests: the samples of each prompt.

        Raises:
            OutOfPages, OutOfStates, RuntimeError: as for `rollout`.
        """
        calls = self._queue(requests)
        await self._ends_of(calls)
        return [output_of(call.samples, self._llm.tokenizer) for call in calls]

    async def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Outputs | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        priority: int = 0,
        **options: object,
    ) -> list[np.ndarray]:
        """Returns the log-probabilities of given tokens, beside other callers, as `LLM.score` does.

        Whole texts take a step each, between steps of the others. Samples are computed with theirs, so the result has
        the rollout's bits with `EngineConfig(batch_invariant=True)`, or `pinned_shapes=True` without recurrent layers.
        Any other engine empties its prefix cache first, and has these bits only if nothing else runs; see `LLM.score`.
        Cancelling the call aborts its requests.

        Args:
            prompts: as for `LLM.score`, like all that is not listed.
            outputs: a `Rollout` of these prompts, or for each prompt the token ids of each of its samples.
            sampling: with `outputs` alone.
            lora: name of the adapter that computes them.
            priority: with `outputs` alone, as for `stream`.
            options: as for `stream`, with `outputs` alone.

        Raises:
            ValueError, ProgramRefused: as for `LLM.score`.
            OutOfPages, OutOfStates: no request runs, and a whole text needs more pages than are free.
            RuntimeError: a sample's request has failed, a text has lost the cache twice, the engine sleeps, has failed
                or was closed.
        """
        if outputs is not None and lora is not None:
            options = by_adapter(options, sampling, lora)
        given = as_call("AsyncLLM.score", options, sampling=sampling)
        if outputs is None:
            texts = await asyncio.to_thread(self._llm.whole_texts, prompts, given)
            return [
                await self.between_steps(partial(self._engine.score_text, text, lora))
                for text in texts
            ]
        replay = await asyncio.to_thread(
            self._llm.replay, prompts, outputs, given["sampling"], priority
        )
        calls = self._queue(replay.requests, clear_prefixes=replay.clears_prefixes)
        await self._ends_of(calls)
        return replay.scores([call.samples for call in calls])

    async def update_weights(
        self,
        params: Params | Iterable[tuple[str, Any]],
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Replaces the model's parameters between two steps, while requests run; see `LLM.update_weights`."""
        return await self.between_steps(
            lambda: self._engine.update_weights(params, version=version, requests=requests)
        )

    async def add_lora(
        self, name: str, path: str | Path, *, version: WeightVersion | None = None
    ) -> WeightVersion:
        """Loads an adapter between two steps, while requests run; see `LLM.add_lora`."""
        engine = self._engine
        factors = await asyncio.to_thread(engine.adapters.read, path)
        return await self.between_steps(
            lambda: engine.adapters.add(name, factors, version, engine.adapters_in_use)
        )

    async def remove_lora(self, name: str) -> None:
        """Removes an adapter between two steps; see `LLM.remove_lora`."""
        engine = self._engine
        await self.between_steps(lambda: engine.adapters.remove(name, engine.adapters_in_use))

    async def sleep(self, level: int = 1) -> None:
        """Gives memory on the device back; see `LLM.sleep`. Requests in progress wait, and new ones raise."""
        await self.between_steps(lambda: self._engine.sleep(level))

    async def wake_up(self) -> None:
        """Makes the cache again after `sleep`, and continues the requests in progress; see `LLM.wake_up`."""
        await self.between_steps(self._engine.wake_up)

    async def between_steps[T](self, call: Callable[[], T]) -> T:
        """Runs a call in the engine's thread between two steps; returns its result, or raises its error.

        The call may use the `LLM` itself, whose other callers are refused. If it finds too few free pages, it runs
        again after the next step, if there is one.
        """
        result: Future[T] = Future()

        def run() -> None:
            if not result.running() and not result.set_running_or_notify_cancel():
                return
            if self._closed:
                result.set_exception(RuntimeError(_ENDED))
                return
            try:
                result.set_result(call())
            except (OutOfPages, OutOfStates) as error:
                if self._engine.has_work:
                    self._loop.put_later(run)
                else:
                    result.set_exception(error)
            except BaseException as error:
                result.set_exception(error)
                # An engine that sleeps has no cache, which looks like a lost one.
                has_lost = self._engine.runner.owner.poisoned and not self._engine.asleep
                if has_lost or is_fatal(error):
                    raise
            finally:
                # The call may have received the last token of a request, and no step may follow.
                self._deliver()

        with self._submit_lock:
            if self._closed:
                raise RuntimeError(_ENDED) from self._failure
            self._loop.put(run)
        return await asyncio.wrap_future(result)

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        salt: str | bytes | None,
        *,
        streamed: bool = False,
    ) -> _Call:
        requests = await asyncio.to_thread(
            self._llm.requests, prompt, params, priority=priority, salt=salt
        )
        [call] = self._queue([requests], streamed=streamed)
        return call

    def _queue(
        self,
        requests: Sequence[list[Request]],
        *,
        streamed: bool = False,
        clear_prefixes: bool = False,
    ) -> list[_Call]:
        """Queues the samples of several prompts, which the engine accepts between the same two steps.

        Args:
            requests: the samples of each prompt.
            streamed: see `_Call`.
            clear_prefixes: empty the prefix cache first.
        """
        loop = asyncio.get_running_loop()
        calls = [_Call(samples, loop, streamed) for samples in requests]

        def accept() -> None:
            if clear_prefixes:
                self._engine.clear_prefixes()
            for call in calls:
                self._accept(call)

        with self._submit_lock:
            if self._closed:
                raise RuntimeError(_ENDED) from self._failure
            self._queued.update(calls)
            self._loop.put(accept)
        return calls

    async def _ends_of(self, calls: Sequence[_Call]) -> None:
        """Waits until all samples of some calls have ended; a caller that is cancelled aborts them."""
        try:
            for call in calls:
                await self._end_of(call)
        finally:
            self._loop.put(lambda: self._abort_all(calls))

    async def _end_of(self, call: _Call) -> None:
        """Waits until all samples of a call have ended, also with an error of their own."""
        if (arrival := await call.arrivals.get()) is not None:
            assert isinstance(arrival, BaseException), "a call that is not streamed gets no pieces"
            raise arrival

    async def _next(self, call: _Call) -> tuple[int, Piece]:
        arrival = await call.arrivals.get()
        assert arrival is not None, "a streamed call gets pieces"
        if isinstance(arrival, BaseException):
            raise arrival
        index, piece = arrival
        if piece.finish_reason == "error" and (error := call.samples[index].error) is not None:
            raise error
        return arrival

    # The methods below run in the engine's thread.

    def _serve(self) -> None:
        try:
            self._llm.lock.let_in_borrower()
            self._loop.run()
        except BaseException as error:
            _LOG.exception("the engine has failed; all open requests raise an error")
            self._failure = error
        finally:
            try:
                self._end_all()
            finally:
                self._llm.lock.take_back()

    def _accept(self, call: _Call) -> None:
        if call.left:
            self._queued.discard(call)
        if call.left or self._closed:
            return
        try:
            call.samples = self._engine.add(call.requests, streamed=call.streamed)
        except (OutOfPages, OutOfStates) as error:
            if not self._engine.has_work:
                self._refuse(call, error)
            else:
                self._loop.put_later(lambda: self._accept(call))
        except STEP_FAILURES as error:
            self._refuse(call, error)
        else:
            self._queued.discard(call)
            self._calls.append(call)

    def _refuse(self, call: _Call, error: BaseException) -> None:
        self._queued.discard(call)
        call.send([error])

    def _abort(self, call: _Call) -> None:
        call.left = True
        for sample in call.samples:
            self._engine.abort(sample)
        if call in self._calls:
            self._calls.remove(call)

    def _abort_all(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            self._abort(call)

    def _deliver(self) -> None:
        for call in list(self._calls):
            arrivals: list[_Arrival] = []
            for index, sample in enumerate(call.samples if call.streamed else ()):
                while sample.pieces:
                    arrivals.append((index, with_figures(sample.pieces.popleft(), sample)))
            if all(sample.status == FINISHED for sample in call.samples):
                self._calls.remove(call)
                if not call.streamed:
                    arrivals.append(None)
            if not call.send(arrivals):
                self._abort(call)

    def _end_all(self) -> None:
        """Refuses new calls, aborts all open and queued ones, and posts the error to their callers."""
        with self._submit_lock:
            self._closed = True
        self._loop.run_left()
        open_calls = [*self._calls, *self._queued]
        self._calls.clear()
        self._queued.clear()
        for call in open_calls:
            failure = RuntimeError(_ENDED)
            failure.__cause__ = self._failure
            call.send([failure])
        for sample in (sample for call in open_calls for sample in call.samples):
            try:
                self._engine.abort(sample)
            except Exception:
                _LOG.exception("a request could not be aborted after the engine's end")
