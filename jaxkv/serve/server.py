"""Runs the HTTP server and the engine process together: start, signals, drain, and the exit code.

The first SIGTERM or SIGINT drains: new requests are answered 503, those in progress go on until they end or the time
is over. The second one ends the server at once. The server ends whenever the engine process does.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxkv.serve import exit_codes
from jaxkv.serve.engine_client import EngineLost
from jaxkv.serve.engine_process import EngineProcess
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.http.protocol import connection_protocol
from jaxkv.serve.http.service import Service
from jaxkv.serve.replicas import ReplicaProcesses
from jaxkv.text.tokenizer import load_tokenizer

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.05
_LAST_REPLIES_SECONDS = 5


class EngineRefused(ValueError):
    """The engine process cannot serve the model; the message is its own."""


class Server:
    """One HTTP server and its engine process.

    Args:
        engine: the engine process, or those of several replicas, just started.
        service: what the routes share; its tokenizer is loaded when the engine is ready.
        config: the config of the HTTP server, with the routes.
        listener: the listening socket, which the server closes.
        drain_seconds: how long requests in progress may go on after the first signal.
        on_ready: called when the first request is taken.
    """

    def __init__(
        self,
        engine: EngineProcess | ReplicaProcesses,
        service: Service,
        config: uvicorn.Config,
        listener: socket.socket,
        *,
        drain_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._service = service
        service.loading = True
        self._http = uvicorn.Server(config)
        self._listener = listener
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._asked = asyncio.Event()
        self._asked_again = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal or the end of the engine process; returns the exit code.

        Raises:
            EngineRefused: the engine cannot serve the model.
        """
        loop = asyncio.get_running_loop()
        client = self._engine.client
        for each in _SIGNALS:
            loop.add_signal_handler(each, self._take_signal)
        try:
            client.start()
            await self._start_http()
            ticking = asyncio.create_task(self._http.main_loop())
            try:
                await _first(self._asked.wait(), self._begin())
                await _first(self._asked.wait(), client.wait_lost())
                if client.failure is None:
                    await self._drain()
            finally:
                code = await self._end()
                self._http.should_exit = True
                await ticking
        finally:
            for each in _SIGNALS:
                loop.remove_signal_handler(each)
        if code == exit_codes.REFUSED and client.facts is None:
            raise EngineRefused(client.last_words)
        return code

    def _take_signal(self) -> None:
        if self._asked.is_set():
            self._asked_again.set()
            # A third one ends the process as if it knew no signals.
            for each in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(each)
        self._asked.set()

    async def _start_http(self) -> None:
        """Opens the listener for requests, which are answered 503 until the engine is ready."""
        config = self._http.config
        config.load()
        self._http.lifespan = config.lifespan_class(config)
        await self._http.startup(sockets=[self._listener])

    async def _begin(self) -> None:
        """Waits for the engine to be ready, or lost; then loads what the routes need of the model."""
        with contextlib.suppress(EngineLost):
            facts = await self._engine.client.ready()
            self._service.loaded(await asyncio.to_thread(load_tokenizer, facts.directory))
            self._on_ready()

    async def _drain(self) -> None:
        """Lets the requests in progress end: all of them, or those that do until time is over or a second signal."""
        self._service.draining = True
        await _first(
            self._no_requests(),
            self._asked_again.wait(),
            self._engine.client.wait_lost(),
            seconds=self._drain_seconds,
        )

    async def _no_requests(self) -> None:
        while self._http.server_state.tasks:
            await asyncio.sleep(_POLL_SECONDS)

    async def _end(self) -> int:
        """Ends both; what is still in progress gets an error. Returns the exit code."""
        client = self._engine.client
        self._service.draining = True
        client.lose("the server is closing", exit_codes.OK)
        await self._http.shutdown(sockets=[self._listener])
        return await self._engine.end(0.0 if self._asked_again.is_set() else 15.0)


def uvicorn_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """Returns the settings of the HTTP server.

    Args:
        app: the application.
        limits: bounds on connections.
    """
    return uvicorn.Config(
        app,
        http=connection_protocol(limits),
        ws="none",
        lifespan="off",
        # Its messages go where those of jaxkv go. Requests are not logged, because they hold prompts.
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=_LAST_REPLIES_SECONDS,
    )


async def _first(*waits: Coroutine[Any, Any, object], seconds: float | None = None) -> None:
    """Waits until one of several has ended, or for a time; cancels the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
