"""The server's application behind real sockets, on a fake engine, in the test's own event loop."""

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

from jaxkv.serve.api.app import make_app
from jaxkv.serve.http.auth import ApiKeys
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.http.protocol import connection_protocol
from jaxkv.serve.http.service import Service
from tests.serve.fake_engine import fake_engine
from tests.serve.http.serving import CHATTY, MODEL


class Listening:
    """A listening server.

    Attributes:
        engine, service: as in `serving.Server`.
        port: of 127.0.0.1.
        uvicorn: the server.
    """

    def __init__(self, engine, service, port, server):
        self.engine, self.service, self.port, self.uvicorn = engine, service, port, server

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def exchange(self, *pieces, wait=0.0):
        """Sends pieces of bytes, `wait` seconds apart, until the server closes; returns all that it sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(reader.read())
        try:
            for piece in pieces:
                if reading.done():
                    break
                writer.write(piece)
                await writer.drain()
                await asyncio.wait((reading,), timeout=wait)
            return await asyncio.wait_for(reading, 20)
        finally:
            reading.cancel()
            writer.close()


@asynccontextmanager
async def listening(*given, keys=(), limits=None, tokenizer=CHATTY, **options):
    """Yields a `Listening`; the arguments are those of `serving`."""
    limits = limits or Limits()
    async with fake_engine(*given, **options) as engine:
        service = Service(engine.client, tokenizer, MODEL, limits=limits)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # Small buffers, so that a reader that takes nothing is noticed after few tokens.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
            config = uvicorn.Config(
                make_app(service, ApiKeys(keys)),
                http=connection_protocol(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield Listening(engine, service, listener.getsockname()[1], server)
            finally:
                server.should_exit = True
                await task
