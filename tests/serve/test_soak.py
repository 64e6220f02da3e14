"""A server under random load for a while: nothing leaks, and what is not aborted has the tokens of a quiet server."""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from jaxkv.serve.http.limits import Limits
from jaxkv.serve.wire import Start
from tests.serve.running import kill, run, server

SECONDS = float(os.environ.get("JAXKV_SOAK_SECONDS", "60"))
"""Seconds under load, after a warm-up; half an hour is what a release needs."""
WORKERS = 24
CACHE = {"max_sequences": 4, "page_size": 16, "budget_bytes": 2**20}
START = Start(dtype="float32", max_model_len=256, cache=CACHE, engine={"token_budget": 32})
MOST_GROWTH = 64 * 2**20
MOST_LATE_GROWTH = 16 * 2**20
"""Bytes that a process may grow by in the second half of the time, when every cache is full."""
GRAMMARS = [
    {"structured_outputs": {"regex": "[a-z]{4,20}[.]"}},
    {"structured_outputs": {"json_object": True}},
]


def request_of(number):
    """Returns the body of one of a few dozen requests; many of them begin alike."""
    draw = random.Random(number)
    prompt = [draw.randrange(10, 4000) for _ in range(40)] if number % 4 else [7] * 48
    return {
        "model": "served",
        "prompt": [*prompt[: draw.randrange(8, 48)], 10 + number],
        "max_tokens": draw.randrange(4, 96),
        "temperature": number % 2,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
        "n": 1 + (number % 5 == 0),
        **(GRAMMARS[number % 20 // 10] if number % 10 == 3 else {}),
    }


BODIES = [request_of(number) for number in range(40)]


def resident(pid):
    """Returns the memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    """Returns the number of files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def tokens_of(reply):
    return [choice["logprobs"]["tokens"] for choice in reply.json()["choices"]]


class Worker:
    """Sends requests of every kind, one after another.

    Args:
        url: of the server.
        wanted: for each body, the tokens of a quiet server.
        seed: of its choices.

    Attributes:
        done: number of requests by kind.
    """

    def __init__(self, url, wanted, seed):
        self._url = f"{url}/v1/completions"
        self._wanted = wanted
        self._draw = random.Random(seed)
        self.done = Counter()

    async def work(self, until):
        loop = asyncio.get_running_loop()
        kinds = [self._whole, self._whole, self._leave, self._cancel, self._read_slowly, self._err]
        async with httpx.AsyncClient(timeout=120) as http:
            while loop.time() < until:
                kind = self._draw.choice(kinds)
                await kind(http, self._draw.randrange(len(BODIES)))
                self.done[kind.__name__.strip("_")] += 1

    async def _whole(self, http, number):
        reply = await http.post(self._url, json=BODIES[number])
        assert reply.status_code == 200, reply.text
        assert tokens_of(reply) == self._wanted[number]

    async def _leave(self, http, number):
        """Closes the connection after some events."""
        left = self._draw.randrange(1, 12)
        given = BODIES[number] | {"stream": True}
        async with http.stream("POST", self._url, json=given) as reply:
            async for _ in reply.aiter_lines():
                left -= 1
                if not left:
                    return

    async def _cancel(self, http, number):
        """Goes before the reply comes."""
        task = asyncio.create_task(http.post(self._url, json=BODIES[number]))
        await asyncio.sleep(self._draw.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _read_slowly(self, http, number):
        given = BODIES[number] | {"stream": True}
        async with http.stream("POST", self._url, json=given) as reply:
            async for _ in reply.aiter_raw(512):
                await asyncio.sleep(0.05)

    async def _err(self, http, number):
        reply = await http.post(self._url, json=BODIES[number] | {"max_tokens": 10**6})
        assert reply.status_code == 400


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_random_requests_leave_nothing_behind_and_change_no_token():
    async def test():
        async with server(START, limits=Limits(most_waiting=4 * WORKERS)) as running:
            async with httpx.AsyncClient(timeout=300) as http:
                url = f"{running.url}/v1/completions"
                wanted = [tokens_of(await http.post(url, json=body)) for body in BODIES]
            pids = {"HTTP": os.getpid(), "engine": running.pid}

            async def load(seconds):
                until = asyncio.get_running_loop().time() + seconds
                workers = [Worker(running.url, wanted, seed) for seed in range(WORKERS)]
                await asyncio.gather(*(worker.work(until) for worker in workers))
                return sum((worker.done for worker in workers), Counter())

            async def at_rest():
                """Waits until nothing runs; returns what the processes hold, by name."""
                stats = await running.client.stats()
                while stats["running"] or stats["waiting"]:
                    stats = await running.client.stats()
                assert running.client.num_open == 0
                assert all(group["used"] == 0 for group in stats["cache"])
                await asyncio.sleep(0.5)
                counts = {
                    "tasks": len(asyncio.all_tasks()),
                    **{f"descriptors of {name}": descriptors(pid) for name, pid in pids.items()},
                }
                return stats, counts, [resident(pid) for pid in pids.values()]

            # Programs for full batches are compiled, and caches fill, before anything is measured.
            await load(min(max(SECONDS / 3, 60), 180))
            _, counts, before = await at_rest()
            done = await load(SECONDS / 2)
            _, _, between = await at_rest()
            done += await load(SECONDS / 2)
            stats, counts_after, after = await at_rest()
            grown = [new - old for new, old in zip(after, before, strict=True)]
            late = [new - old for new, old in zip(after, between, strict=True)]
            report = {
                "seconds": SECONDS,
                "requests": done.total(),
                **done,
                "steps": stats["steps"],
                "recoveries": stats["recoveries"],
                **counts_after,
                **{f"{name} MiB": now / 2**20 for name, now in zip(pids, after, strict=True)},
                **{f"{name} grown KiB": new / 1024 for name, new in zip(pids, grown, strict=True)},
                **{f"{name} late KiB": new / 1024 for name, new in zip(pids, late, strict=True)},
            }
            print(json.dumps(report))
            assert done["whole"] > WORKERS
            assert done["leave"] + done["cancel"] > WORKERS
            assert all(counts_after[name] <= count for name, count in counts.items())
            assert max(grown) < MOST_GROWTH
            assert max(late) < MOST_LATE_GROWTH
            kill()

    run(test, seconds=SECONDS * 2 + 500)
