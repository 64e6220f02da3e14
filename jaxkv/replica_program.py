"""The program of a replica's process: `python -m jaxkv.replica_program FD`, started by `LLM(data_parallel_size=...)`.

It makes an `LLM`, serves it by an `AsyncLLM`, and runs the operations that its front asks for over a socket. It ends
when the socket does.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.async_llm import AsyncLLM
from jaxkv.cache.prefix.report import Explanation
from jaxkv.config.plain_sampling import unpack_sampling
from jaxkv.engine.request import Piece, RequestOutput
from jaxkv.engine.saved_prefixes import PrefixCounts
from jaxkv.engine.warm_up import WarmUp
from jaxkv.errors import CachePoisoned
from jaxkv.links.channel import Channel, channel_of_descriptor
from jaxkv.llm import LLM
from jaxkv.models.tensor_parallel import TensorParallel
from jaxkv.monitoring.stats import Stats
from jaxkv.options import processor_functions
from jaxkv.replicas.messages import VALUES, Facts, as_value
from jaxkv.replicas.router import block_sizes
from jaxkv.runner.weight_version import WeightVersion

_LOG = logging.getLogger(__name__)

_FAILED = 1


class Operations:
    """What a front may ask a replica for; the methods are those of `LLM`, one prompt at a time.

    Args:
        llm: the model.
        served: serves it.
    """

    def __init__(self, llm: LLM, served: AsyncLLM) -> None:
        self._llm = llm
        self._served = served

    async def check(self, *, prompt_tokens: int, sampling: dict[str, Any]) -> None:
        """Raises what a request with a prompt of this length would raise; it compiles its grammar."""
        prompt, params = [0] * prompt_tokens, unpack_sampling(sampling)
        requests = await asyncio.to_thread(self._llm.requests, prompt, params)
        self._llm.engine.check(requests[0])

    async def generate(
        self, *, prompt: dict[str, Any], sampling: dict[str, Any], priority: int = 0
    ) -> RequestOutput:
        """Returns the output of one prompt; a request that failed has the reason "error"."""
        params = unpack_sampling(sampling)
        requests = await asyncio.to_thread(self._llm.requests, prompt, params, priority=priority)
        [output] = await self._served.outputs_of([requests])
        return output

    def stream(
        self, *, prompt: dict[str, Any], sampling: dict[str, Any], priority: int = 0
    ) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of one prompt."""
        return self._served.stream(prompt, unpack_sampling(sampling), priority=priority)

    async def score_texts(self, *, texts: list[list[int]], lora: str | None) -> list[np.ndarray]:
        """Returns the log-probabilities of whole texts."""
        return await self._served.score(texts, lora=lora)

    async def score_samples(
        self,
        *,
        prompts: list[dict[str, Any]],
        outputs: list[list[list[int]]],
        sampling: list[dict[str, Any]] | None,
        priority: int = 0,
    ) -> list[np.ndarray]:
        """Returns the log-probabilities of given samples."""
        params = None if sampling is None else [unpack_sampling(one) for one in sampling]
        return await self._served.score(prompts, outputs, params, priority=priority)

    async def update_weights(
        self,
        *,
        tree: dict[str, Any] | None,
        named: list[tuple[str, np.ndarray]] | None,
        version: WeightVersion | None,
        requests: str,
    ) -> WeightVersion:
        """Replaces the parameters by arrays of the host."""
        given = named if tree is None else await asyncio.to_thread(self._placed, tree)
        return await self._served.update_weights(given, version=version, requests=requests)

    async def load_lora(
        self, *, path: str | None, version: WeightVersion | None, requests: str
    ) -> WeightVersion:
        """See `LLM.load_lora`."""
        return await self._served.between_steps(
            lambda: self._llm.load_lora(path, version=version, requests=requests)
        )

    async def add_lora(
        self, *, name: str, path: str, version: WeightVersion | None
    ) -> WeightVersion:
        """See `LLM.add_lora`."""
        return await self._served.add_lora(name, path, version=version)

    async def remove_lora(self, *, name: str) -> None:
        """See `LLM.remove_lora`."""
        await self._served.remove_lora(name)

    async def list_loras(self) -> dict[str, WeightVersion]:
        """See `LLM.list_loras`."""
        return self._llm.list_loras()

    async def sleep(self, *, level: int) -> None:
        """See `LLM.sleep`."""
        await self._served.sleep(level)

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self._served.wake_up()

    async def warm_up(self, *, sampling: dict[str, Any], options: dict[str, Any]) -> WarmUp:
        """See `LLM.warm_up`."""
        params = unpack_sampling(sampling)
        return await self._served.between_steps(
            lambda: self._llm.warm_up(sampling=params, **options)
        )

    async def finish_warm_up(self) -> None:
        """See `LLM.finish_warm_up`."""
        await asyncio.to_thread(self._llm.finish_warm_up)

    async def stats(self) -> Stats:
        """See `LLM.stats`."""
        return await self._served.between_steps(self._llm.stats)

    async def explain(self, *, prompt: dict[str, Any], lora: str | None) -> Explanation:
        """See `LLM.explain`."""
        return await self._served.between_steps(lambda: self._llm.explain(prompt, lora=lora))

    async def save_prefixes(
        self, *, path: str, prompts: list[dict[str, Any]] | None
    ) -> PrefixCounts:
        """See `LLM.save_prefixes`."""
        return await self._served.between_steps(lambda: self._llm.save_prefixes(path, prompts))

    async def load_prefixes(self, *, path: str) -> PrefixCounts:
        """See `LLM.load_prefixes`."""
        return await self._served.between_steps(lambda: self._llm.load_prefixes(path))

    def _placed(self, tree: dict[str, Any]) -> Any:  # noqa: ANN401 - a pytree
        """Returns arrays of the host, given by their paths, as a tree like the parameters."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(
            self._llm.engine.runner.param_types
        )
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        if odd := sorted(set(paths) ^ set(tree)):
            raise ValueError(
                f"the new parameters and those of the model differ in {len(odd)} names, {odd[0]} for one; nothing was "
                "changed"
            )
        params = structure.unflatten(tree[path] for path in paths)
        model = self._llm.model
        if not isinstance(model, TensorParallel):
            return params
        return model.divided(jax.tree.map(jnp.asarray, params))


class _Server:
    """Runs operations as tasks of one event loop."""

    def __init__(self, llm: LLM, served: AsyncLLM, channel: Channel) -> None:
        self._served = served
        self._channel = channel
        self._operations = Operations(llm, served)
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    def take(self, kind: str, number: int, *call: Any) -> None:  # noqa: ANN401
        """Handles a message, on the event loop."""
        if kind == "cancel":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        operation, arguments = call
        task = asyncio.get_running_loop().create_task(self._run(number, operation, arguments))
        self._tasks[number] = task
        task.add_done_callback(lambda done: self._reply(number, done))

    async def _run(self, number: int, operation: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Returns the result of an operation; sends the pieces of a stream, which has none."""
        begun = getattr(self._operations, operation)(**arguments)
        if operation != "stream":
            return await begun
        async with aclosing(begun) as pieces:
            async for piece in pieces:
                self._channel.send("pieces", number, [piece])
        return None

    def _reply(self, number: int, task: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        if self._served.failure is not None:
            # No call can go on here, and all may elsewhere: the front learns that from the end of this process.
            _end(_FAILED)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._channel.send("done", number, task.result())
            return
        self._channel.send("error", number, as_value(error))


def main() -> int:
    """Serves the socket whose number is the only argument; returns the exit code."""
    # The front decides when to end. A terminal sends Ctrl-C to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    channel = channel_of_descriptor(int(sys.argv[1]), VALUES)
    message = channel.receive()
    if message is None:
        return _FAILED
    _, options = message
    asyncio.run(_serve(channel, options))
    return 0


async def _serve(channel: Channel, options: Mapping[str, Any]) -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[list[Any]]()

    def read() -> None:
        while (message := channel.receive()) is not None:
            loop.call_soon_threadsafe(arrived.put_nowait, message)
        # No caller waits for what still runs, also if the model is still being loaded.
        _end(0)

    threading.Thread(target=read, name="jaxkv-front", daemon=True).start()
    try:
        llm = await asyncio.to_thread(_load, options)
    except (ValueError, OSError, RuntimeError, MemoryError, CachePoisoned) as error:
        channel.send("refused", 0, as_value(error))
        await asyncio.Event().wait()
        return
    served = AsyncLLM(llm)
    channel.send("ready", 0, _facts(llm))
    # What is loaded by now stays; the garbage collector need not look at it again between steps.
    gc.collect()
    gc.freeze()
    server = _Server(llm, served, channel)
    while True:
        server.take(*await arrived.get())


def _load(options: Mapping[str, Any]) -> LLM:
    processors = processor_functions(options["logits_processors"])
    return LLM(**{**options, "logits_processors": processors or None}, progress=False)


def _facts(llm: LLM) -> Facts:
    block, cache_tokens = block_sizes(llm.layout, llm.budget.counts)
    return Facts(
        eos_ids=llm.eos_ids,
        max_model_len=llm.max_model_len,
        vocab_size=llm.model.vocab_size,
        max_sequences=llm.engine.sequence_runner.max_rows,
        block=block,
        cache_tokens=cache_tokens,
        repeats_bits=llm.engine.repeats_bits,
    )


def _end(code: int) -> None:
    """Ends the process at once: daemon threads may be inside JAX, which would crash while Python ends."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
