"""Sends requests at their times, with a bound on those in flight, and collects their timelines."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from jaxkv.bench.figures import Timeline

type Clock = Callable[[], float]
"""Returns seconds, and never goes back."""
type Send = Callable[[int, Timeline, Clock], Awaitable[None]]
"""Sends a request, by its index, and fills its timeline, whose times are those of the clock."""


class Load:
    """Requests that are sent as they come due, and what came of them so far.

    A request's latencies count from its sending. That is later than it was due where `max_concurrency` held it back,
    and a little where the client was busy.

    Attributes:
        ended: timelines of the requests that ended, in the order in which they ended.
        lags: seconds by which requests were sent late though nothing held them back.
        running: number of requests that were sent and have not ended.
        interrupted: whether the run was cancelled, so that the rest was not sent or was given up.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """Takes the clock of all times; an event loop's own may be coarse, such as uvloop's milliseconds."""
        self.ended: list[Timeline] = []
        self.lags: list[float] = []
        self.running = 0
        self.interrupted = False
        self._clock = clock
        self._start = 0.0

    async def run(
        self, send: Send, due: Sequence[float], max_concurrency: int | None = None
    ) -> None:
        """Sends all requests and returns once they have ended; when cancelled, it gives up the others and returns.

        Args:
            send: sends one request.
            due: seconds from now at which each request is due, ascending.
            max_concurrency: most requests that run at once; `None` for all.
        """
        self._start = self._clock()
        places = asyncio.Semaphore(max_concurrency or len(due))
        tasks = []
        try:
            for index, at in enumerate(due):
                if (wait := at - self._now()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self._one(send, index, at, places)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            current = asyncio.current_task()
            assert current is not None, "a coroutine runs in a task"
            current.uncancel()

    def _now(self) -> float:
        return self._clock() - self._start

    async def _one(self, send: Send, index: int, due: float, places: asyncio.Semaphore) -> None:
        was_held_back = places.locked()
        async with places:
            timeline = Timeline(prompt_tokens=0, arrived=self._now())
            if was_held_back:
                timeline.queued = (due, timeline.arrived)
            else:
                self.lags.append(timeline.arrived - due)
            self.running += 1
            try:
                await send(index, timeline, self._now)
            finally:
                self.running -= 1
            self.ended.append(timeline)
