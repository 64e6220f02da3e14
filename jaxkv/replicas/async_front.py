"""`AsyncReplicatedLLM`: the methods of `AsyncLLM` over several replicas."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Sharding

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Piece, RequestOutput
from jaxkv.errors import ReplicaLost
from jaxkv.given_samples import Outputs, by_adapter
from jaxkv.models.protocol import Params
from jaxkv.replicas.front import ReplicatedLLM
from jaxkv.replicas.group import Job
from jaxkv.rollout import Rollout, rollout_of
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.text.prompts import Prompt, as_call, one_each, one_sample

_ENDED = "this AsyncLLM was closed; make another one of the LLM"


class AsyncReplicatedLLM:
    """Serves concurrent asyncio callers with replicas; `AsyncLLM(LLM(data_parallel_size=...))` makes it.

    See `AsyncLLM` for what each method takes, returns and raises, and `ReplicatedLLM` for lost replicas. The calls of
    the `LLM` itself stay open, since replicas serve several callers anyhow.

    Args:
        llm: the replicas.
    """

    def __init__(self, llm: ReplicatedLLM) -> None:
        self._llm = llm
        self._open: set[Future[Any]] = set()
        self._closed = False

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

    async def close(self) -> None:
        """Aborts all requests; the replicas stay. A second call does nothing."""
        self._closed = True
        for result in list(self._open):
            result.cancel()

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
        **options: object,
    ) -> AsyncGenerator[Piece, None]:
        """Yields pieces of text as they are generated; see `AsyncLLM.stream`."""
        given = as_call("AsyncLLM.stream", options, sampling=sampling, salt=salt)
        params = one_sample(given["sampling"])
        [job] = await self._jobs([prompt], [params], priority, given["salt"])
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[list[Piece] | None]()

        def post(pieces: list[Piece] | None) -> None:
            # In the thread that reads for all callers: a caller's closed loop must not end it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, pieces)

        result = self._begun(await self._begin("stream", job, post))
        result.add_done_callback(lambda _: post(None))
        try:
            while (pieces := await arrived.get()) is not None:
                for piece in pieces:
                    yield piece
            if result.cancelled():
                raise RuntimeError(_ENDED)
            result.result()
        finally:
            result.cancel()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
        **options: object,
    ) -> RequestOutput:
        """Returns all samples of one prompt when they have ended; see `AsyncLLM.generate`."""
        given = as_call("AsyncLLM.generate", options, sampling=sampling, salt=salt)
        [params] = one_each(given["sampling"], 1)
        [job] = await self._jobs([prompt], [params], priority, given["salt"])
        output = await self._output_of(job)
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise RuntimeError(sample.error)
        return output

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
        """Generates all samples of some prompts as padded arrays; see `AsyncLLM.rollout`."""
        given = as_call("AsyncLLM.rollout", options, sampling=sampling, salt=salt)
        jobs, output_width = await asyncio.to_thread(
            partial(
                self._llm.rollout_jobs,
                prompts,
                given["sampling"],
                prompt_width=prompt_width,
                output_width=output_width,
                priority=priority,
                salt=given["salt"],
            )
        )
        waiting = [asyncio.ensure_future(self._output_of(job)) for job in jobs]
        try:
            outputs = await asyncio.gather(*waiting)
        finally:
            # After an error of one, no caller waits for the others.
            for one in waiting:
                one.cancel()
        made = rollout_of(
            outputs, prompt_width=prompt_width, output_width=output_width, pad_id=pad_id
        )
        return made if device is None else made.to(device)

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
        """Returns the log-probabilities of given tokens; see `ReplicatedLLM.score`."""
        if outputs is not None and lora is not None:
            options = by_adapter(options, sampling, lora)
        given = as_call("AsyncLLM.score", options, sampling=sampling)
        begin = partial(self._llm.begin_scores, prompts, outputs, given, lora, priority)
        begun = await _sent(begin)
        try:
            shares = await asyncio.gather(*(self._result_of(one) for one in begun))
        finally:
            for one in begun:
                one.cancel()
        return [scores for share in shares for scores in share]

    async def update_weights(
        self,
        params: Params | Iterable[tuple[str, Any]],
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Replaces the parameters of all replicas; see `ReplicatedLLM.update_weights`."""
        return await self._in_thread("update_weights", params, version=version, requests=requests)

    async def add_lora(
        self, name: str, path: str | Path, *, version: WeightVersion | None = None
    ) -> WeightVersion:
        """Loads an adapter on all replicas; see `LLM.add_lora`."""
        return await self._in_thread("add_lora", name, path, version=version)

    async def remove_lora(self, name: str) -> None:
        """Removes an adapter from all replicas; see `LLM.remove_lora`."""
        await self._in_thread("remove_lora", name)

    async def sleep(self, level: int = 1) -> None:
        """Gives memory of all replicas back; see `LLM.sleep`."""
        await self._in_thread("sleep", level)

    async def wake_up(self) -> None:
        """Makes the caches of all replicas again; see `LLM.wake_up`."""
        await self._in_thread("wake_up")

    async def _in_thread(self, method: str, *values: Any, **options: Any) -> Any:  # noqa: ANN401
        """Calls a method of the `LLM` in a thread."""
        self._refuse_if_closed()
        return await asyncio.to_thread(getattr(self._llm, method), *values, **options)

    async def _jobs(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        priority: int,
        salt: str | bytes | None,
    ) -> list[Job]:
        self._refuse_if_closed()
        return await asyncio.to_thread(
            partial(self._llm.jobs, prompts, sampling, priority=priority, salt=salt)
        )

    async def _output_of(self, job: Job) -> RequestOutput:
        """Returns the output of a job; it runs once more if its replica is lost."""
        try:
            found = await self._result_of(await self._begin("generate", job))
        except ReplicaLost:
            found = await self._result_of(await self._begin("generate", job))
        return self._llm.numbered(found)

    async def _begin(self, operation: str, job: Job, pieces: Any = None) -> "Future[Any]":  # noqa: ANN401
        """Begins a job; see `_sent`."""

        def begin() -> "list[Future[Any]]":
            begun = self._llm.group.begin(operation, job, pieces=pieces)
            assert begun is not None, "there is no limit"
            return [begun]

        [begun] = await _sent(begin)
        return begun

    def _begun(self, result: "Future[Any]") -> "Future[Any]":
        """Notes a call in progress, which `close` aborts."""
        self._open.add(result)
        result.add_done_callback(self._open.discard)
        if self._closed:
            result.cancel()
        return result

    async def _result_of(self, result: "Future[Any]") -> Any:  # noqa: ANN401
        """Waits for a result; a caller that is cancelled aborts it."""
        self._begun(result)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            if self._closed and result.cancelled():
                raise RuntimeError(_ENDED) from None
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(_ENDED)


async def _sent(begin: "Callable[[], list[Future[Any]]]") -> "list[Future[Any]]":
    """Begins calls in a thread, since that may wait; a caller that is cancelled meanwhile aborts them."""
    beginning = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(beginning)
    except asyncio.CancelledError:
        beginning.add_done_callback(_abort)
        raise


def _abort(beginning: "asyncio.Future[list[Future[Any]]]") -> None:
    """Aborts what was begun for a caller that has left."""
    if beginning.cancelled() or beginning.exception() is not None:
        return
    for begun in beginning.result():
        begun.cancel()
