"""`StatsPoll`: caches the engine's statistics, so that many readers cost the engine one reply in half a second."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from jaxkv.serve.engine_client import EngineClient, EngineLost
from jaxkv.serve.replicas import ReplicaClient

GOOD_SECONDS = 0.5
"""Age up to which statistics are returned again without asking the engine."""

MOST_SHARE = 0.01
"""Largest share of the engine's time that drawing pictures may take; a slow picture is kept for longer."""

WAIT_SECONDS = 2.0
"""Longest wait for an engine that is in a long step or compiles; then the last statistics are returned again."""


class EngineSilent(RuntimeError):
    """The engine has not answered yet, and no earlier statistics are known."""


@dataclass(frozen=True)
class Snapshot:
    """The engine's statistics at one moment.

    Attributes:
        stats: see `StatsReply`.
        age: seconds since the engine sent them.
    """

    stats: dict[str, Any]
    age: float


class StatsPoll:
    """Asks one engine, or several replicas. All methods belong to one event loop.

    Args:
        client: the engine process.
        pages: ask for the picture of the engine too.
    """

    def __init__(self, client: EngineClient | ReplicaClient, *, pages: bool) -> None:
        self._client = client
        self._pages = pages
        self._stats: dict[str, Any] | None = None
        self._at = 0.0
        self._good_for = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> Snapshot:
        """Returns the latest statistics.

        Raises:
            EngineSilent: the engine has never answered and does not answer now.
            EngineLost: the engine process has ended.
        """
        if self._client.failure is not None:
            raise self._client.failure
        if self._stats is None or self._age() >= self._good_for:
            self._asking = self._asking or asyncio.create_task(self._ask(), name="engine stats")
            # Not awaited itself: others wait for it too when this one is cancelled.
            await asyncio.wait((self._asking,), timeout=WAIT_SECONDS)
        if self._client.failure is not None:
            raise self._client.failure
        if self._stats is None:
            raise EngineSilent(
                "the engine has not answered; it loads, compiles or is in a long step"
            )
        return Snapshot(self._stats, self._age())

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._at

    async def _ask(self) -> None:
        try:
            with contextlib.suppress(EngineLost):
                self._stats = await self._client.stats(pages=self._pages)
                self._at = asyncio.get_running_loop().time()
                took = self._stats.get("picture_seconds", 0.0)
                self._good_for = max(GOOD_SECONDS, took / MOST_SHARE)
        finally:
            self._asking = None
