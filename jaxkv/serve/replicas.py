"""The engine processes of several replicas as one: `ReplicaClient` and `ReplicaProcesses`.

They have the methods of `EngineClient` and `EngineProcess` that the server uses, so nothing behind them knows of
replicas. A process per replica, because each engine keeps Python busy for a large part of a step, which threads of one
interpreter would add up, and because a fault that breaks a CUDA context ends one replica then and not all.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from jaxkv.config.sampling import SamplingParams
from jaxkv.replicas.devices import replica_environments
from jaxkv.replicas.router import Router
from jaxkv.replicas.totals import total
from jaxkv.serve import exit_codes
from jaxkv.serve.engine_client import Call, EngineClient, EngineLost
from jaxkv.serve.engine_process import EngineProcess
from jaxkv.serve.wire import Alive, Ready, Start

_LOG = logging.getLogger(__name__)


class ReplicaClient:
    """Sends each call to one of several engine processes. All methods belong to one event loop.

    A replica that is lost ends its calls with `ReplicaLost`; the others go on. The client is lost when all are, or when
    one is before all were ready.

    Args:
        clients: one for each replica.

    Attributes:
        clients: one for each replica.
        lost_by: the replica whose loss ended the client; `None` while a replica works.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = clients
        for number, client in enumerate(clients):
            client.replica = f"replica {number} of {len(clients)}"
        self._router: Router | None = None
        self.lost_by: EngineClient | None = None
        self._lost = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def live(self) -> list[EngineClient]:
        """The replicas that are not lost."""
        return [client for client in self.clients if client.failure is None]

    @property
    def facts(self) -> Ready | None:
        """The facts about the model, with the sequences of all replicas that work; `None` until all are ready."""
        known = [client.facts for client in self.live if client.facts is not None]
        if self._router is None or not known:
            return None
        sequences = sum(facts.max_sequences for facts in known)
        return msgspec.structs.replace(known[0], max_sequences=sequences)

    @property
    def alive(self) -> Alive:
        """A sign of life; it names a program if a replica compiles one."""
        signs = [client.alive for client in self.live]
        return next((sign for sign in signs if sign.compiling), Alive())

    @property
    def failure(self) -> EngineLost | None:
        """Why no call goes on; `None` while a replica works."""
        return None if self.lost_by is None else self.lost_by.failure

    @property
    def last_words(self) -> str:
        """What the replica wrote whose loss ended the client."""
        lost = self.lost_by
        return f"{lost.replica}: {lost.last_words}" if lost and lost.last_words else ""

    @property
    def exit_code(self) -> int:
        """The exit code of the replica whose loss ended the client."""
        return exit_codes.FAILED if self.lost_by is None else self.lost_by.exit_code

    @property
    def num_open(self) -> int:
        """Number of samples in the engines."""
        return sum(client.num_open for client in self.live)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last frame of the replica that is silent for longest."""
        return max((client.silent_seconds for client in self.live), default=0.0)

    def start(self) -> None:
        """Begins to read the sockets, on the running event loop."""
        for client in self.clients:
            client.start()
            self._watches.append(asyncio.create_task(self._watch(client)))

    async def ready(self) -> Ready:
        """Waits until every replica has loaded its model; returns the facts about it.

        Raises:
            EngineLost: a replica has ended instead; then the others are lost too.
        """
        [first, *_] = await asyncio.gather(*(client.ready() for client in self.clients))
        self._router = Router(
            len(self.clients), block=first.page_size, cache_tokens=first.cache_tokens
        )
        facts = self.facts
        if facts is None:
            raise self.failure or EngineLost("the engine processes have ended")
        return facts

    async def wait_lost(self) -> EngineLost:
        """Waits until the client is lost; returns why."""
        await self._lost.wait()
        return self.failure or EngineLost("the engine processes have ended")

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes | None = None,
    ) -> Call:
        """Begins all samples of one prompt on the replica that the router chooses; see `EngineClient.submit`."""
        if not self.live:
            raise self.failure or EngineLost("no replica is left")
        assert self._router is not None, "calls come when all replicas are ready"
        loads = [client.num_open if client.failure is None else None for client in self.clients]
        chosen = self._router.choose(ids, loads, (salt, params.lora))
        return self.clients[chosen].submit(ids, params, priority=priority, salt=salt)

    async def stats(self, *, pages: bool = False) -> dict[str, object]:
        """Returns the statistics of all replicas together, and under "replicas" those of each one; `None` if lost.

        The picture of pages is that of the first replica that works.

        Args:
            pages: also the holder of each page and state.

        Raises:
            EngineLost: no replica works.
        """
        if not self.live:
            raise self.failure or EngineLost("no replica is left")
        asked = [
            client.stats(pages=pages and client is self.live[0]) if client.failure is None else None
            for client in self.clients
        ]
        given = await asyncio.gather(*filter(None, asked), return_exceptions=True)
        answers = iter(given)
        each = [None if one is None else next(answers) for one in asked]
        known = [one if isinstance(one, dict) else None for one in each]
        if not any(known):
            raise self.failure or EngineLost("no replica has answered")
        return {**total(known), "replicas": known}

    async def close(self) -> None:
        """Closes all sockets, which ends the engine processes."""
        self.lose("the server is closing", exit_codes.OK)
        await asyncio.gather(*self._watches, return_exceptions=True)
        for client in self.clients:
            await client.close()

    def lose(self, why: str, code: int) -> None:
        """Fails all calls and refuses new ones; only the first reason counts."""
        if self.live:
            [first, *_] = self.live
            first.lose(why, code)
            self._end(first)

    async def _watch(self, client: EngineClient) -> None:
        """Waits until a replica is lost; says so, and ends the client if no other goes on."""
        await client.wait_lost()
        left = len(self.live)
        _LOG.error(
            "%s is lost (%s); its requests ended with an error, %s",
            client.replica,
            client.last_words or client.failure,
            f"{left} of {len(self.clients)} go on" if left else "and no other is left",
        )
        if self._router is None or not left:
            self._end(client)
        else:
            self._router.forget(self.clients.index(client))

    def _end(self, failed: EngineClient) -> None:
        """States that the client is lost, by the loss of a replica."""
        if self.lost_by is not None:
            return
        self.lost_by = failed
        for client in self.live:
            client.lose("the server is closing", exit_codes.OK)
        for watch in self._watches:
            if watch is not asyncio.current_task():
                watch.cancel()
        self._lost.set()


class ReplicaProcesses:
    """The engine processes of several replicas.

    Args:
        start: what each loads.
        count: number of replicas.
        program: the module that they run.

    Attributes:
        client: sends them requests and receives their tokens.

    Raises:
        ValueError: there are too few GPUs.
        OSError: a process could not be started.
    """

    def __init__(
        self, start: Start, count: int, program: str = "jaxkv.serve.engine_program"
    ) -> None:
        places = replica_environments(count, start.tensor_parallel_size)
        self.processes = [EngineProcess(start, program, place) for place in places]
        self.client = ReplicaClient([process.client for process in self.processes])

    async def end(self, seconds: float = 15.0) -> int:
        """Ends all processes; see `EngineProcess.end`. Returns the code of the replica whose loss ended the client."""
        await self.client.close()
        codes = await asyncio.gather(*(process.end(seconds) for process in self.processes))
        lost_by = self.client.lost_by
        assert lost_by is not None, "a closed client is lost"
        return codes[self.client.clients.index(lost_by)]
