"""Measures how many streamed events `jaxkv bench serve` reads per second of one core, so that it is no bottleneck.

    python -m benchmarks.load_client

A server in a process of its own sends each of many streams some events in one packet, every 50 ms, so slowly that the
client is idle most of the time: packets of a client that falls behind would come together and be cheaper. The client's
processor time is counted: on uvloop, as the command runs; on asyncio's own loop; and, as a peer, httpx that reads the
same lines and parses the same JSON. Record: load-client.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv.bench.client.measure import LoadTest, Run, measure_server
from jaxkv.bench.workload import Workload

STREAMS, EVENTS, PERIOD = 256, 100, 0.05

_EVENT = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1790000000,
    "model": "qwen3-0.6b",
    "choices": [{"index": 0, "text": " hello", "logprobs": None, "finish_reason": None}],
}


def _sse(event: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


def _chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def serve(per_packet: int, events: int = EVENTS, period: float = PERIOD) -> None:
    """Serves on a free port, which it prints, until it is ended."""
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    counts = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": events}}
    end = _chunk(_sse(last) + _sse(counts) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
    packet = _chunk(_sse(_EVENT)) * per_packet
    streams: list[tuple[asyncio.StreamWriter, int]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"data": [{"id": "model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            writer.close()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            streams.append((writer, events))

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    try:
        print(server.sockets[0].getsockname()[1], flush=True)
        while True:
            await asyncio.sleep(period)
            running = []
            for writer, left in streams:
                writer.write(packet)
                if left > per_packet:
                    running.append((writer, left - per_packet))
                else:
                    writer.write(end)
                    writer.close()
            streams[:] = running
    finally:
        server.close()


async def read_with_us(url: str, streams: int) -> int:
    """Reads all streams with the load client; returns the number of events."""
    runs: list[Run] = []
    workload = Workload(requests=streams, prompt_tokens=(8, 8), output_tokens=(8, 8))
    test = LoadTest(base_url=url, vocab_size=100, workload=workload)
    await measure_server(test, report=runs.append, note=print, status=lambda text: None)
    assert runs[0].figures.requests == streams, "every stream was read to its end"
    return runs[0].figures.output_tokens


async def read_with_httpx(url: str, streams: int) -> int:
    """Reads all streams with httpx; returns the number of events."""
    limits = httpx.Limits(max_connections=None)

    async def read(client: httpx.AsyncClient) -> int:
        events = 0
        async with client.stream("POST", f"{url}/v1/completions", json={}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    events += bool(choices and choices[0]["text"])
        return events

    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        return sum(await asyncio.gather(*(read(client) for _ in range(streams))))


async def measure(
    read: Callable[[str, int], Awaitable[int]], per_packet: int, streams: int = STREAMS
) -> dict[str, float]:
    """Starts a server, reads its streams, and returns the events per second of processor time and of wall time."""
    command = [sys.executable, "-m", "benchmarks.load_client", "--serve", str(per_packet)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None, "it was asked for"
        url = f"http://127.0.0.1:{int(await server.stdout.readline())}"
        # Modules and connections of a first call are not measured.
        await read(url, 1)
        busy, began = _processor_seconds(), time.perf_counter()
        events = await read(url, streams)
        busy, wall = _processor_seconds() - busy, time.perf_counter() - began
    finally:
        server.kill()
        await server.wait()
    return {"events": events, "events per core second": events / busy, "events/s": events / wall}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(*arguments: str) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args(arguments or None)
    if options.serve:
        uvloop.run(serve(options.serve))
        return
    ways = {
        "jaxkv bench serve": (read_with_us, uvloop.new_event_loop),
        "the same on asyncio's loop": (read_with_us, asyncio.new_event_loop),
        "httpx": (read_with_httpx, asyncio.new_event_loop),
    }
    rows = []
    for per_packet in (1, 4):
        for client, (read, loop) in ways.items():
            found = asyncio.run(measure(read, per_packet), loop_factory=loop)
            rounded = {name: round(number) for name, number in found.items()}
            rows.append({"client": client, "events per packet": per_packet, **rounded})
    path = save_record("load-client", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
