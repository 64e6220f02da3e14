"""A server in the test's own process, with an engine process of any program; what both leave behind is an error."""

import asyncio
import contextlib
import gc
import os
import signal

import httpx
import uvloop

from jaxkv.serve.api.app import make_app
from jaxkv.serve.engine_process import EngineProcess
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.http.service import Service
from jaxkv.serve.listener import open_listener, url_of
from jaxkv.serve.server import Server, uvicorn_config


class Running:
    """A server in this process, and its engine in another.

    Attributes:
        url: its address.
        pid: the engine process's.
        ended: its exit code, once it has ended.
        ready: set when it is ready.
    """

    def __init__(self, start, program, app, drain_seconds, limits, processes=EngineProcess):
        listener = open_listener("127.0.0.1", 0, has_keys=False)
        self.url = url_of(listener, "127.0.0.1")
        engine = processes(start, program)
        self.pid = engine._process.pid
        self.client = engine.client
        self.service = Service(engine.client, None, "served", limits or Limits())
        self.ready = asyncio.Event()
        config = uvicorn_config(app(self.service), self.service.limits)
        server = Server(
            engine,
            self.service,
            config,
            listener,
            drain_seconds=drain_seconds,
            on_ready=self.ready.set,
        )
        self.ended = asyncio.create_task(server.run())

    async def draining(self):
        """Waits until no new requests are taken."""
        while not self.service.draining:
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def server(
    start,
    program="jaxkv.serve.engine_program",
    *,
    app=make_app,
    drain_seconds=60.0,
    ready=True,
    limits=None,
):
    """Yields a server; in the end both processes are gone, with their tasks and descriptors."""
    descriptors, tasks = open_descriptors(), len(asyncio.all_tasks())
    running = Running(start, program, app, drain_seconds, limits)
    if ready:
        await running.ready.wait()
    yield running
    with contextlib.suppress(ValueError, OSError):
        await running.ended
    assert not os.path.exists(f"/proc/{running.pid}")
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == tasks
    del running
    gc.collect()
    assert open_descriptors() == descriptors


def open_descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    # libuv holds one in reserve for the day when there are no more descriptors.
    return {name: target for name, target in found.items() if target != "/dev/null"}


def run(test, seconds=60.0):
    """Runs a test on the event loop that the server uses."""

    async def warm():
        async with httpx.AsyncClient():
            pass  # What httpx opens once is not the server's.
        await asyncio.wait_for(test(), seconds)

    uvloop.run(warm())


def kill(number=signal.SIGTERM):
    """Sends a signal to this process, which is the server's."""
    os.kill(os.getpid(), number)
