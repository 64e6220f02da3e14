"""A headless Chromium that loads one page, and a server of the dashboard for it."""

import asyncio
import shutil
import socket
import subprocess
import tempfile
import threading
from contextlib import contextmanager

import pytest
import uvicorn

from jaxkv.serve.api.app import make_app
from jaxkv.serve.http.auth import ApiKeys
from jaxkv.serve.http.service import Service
from tests.serve.fake_engine import fake_engine

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on the PATH")


def load(address, *options, milliseconds=4000):
    """Returns (the page as Chromium has it after some time, the console's messages)."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                PROGRAM,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking", "--disable-sync"),
                *("--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={milliseconds}",
                *options,
                "--dump-dom",
                address,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, messages


@contextmanager
def dashboard_server(*, keys=(), model="tiny model", change=None):
    """Yields the port of a server on a fake engine.

    Args:
        keys: API keys.
        model: name of the model.
        change: called with the service and the engine before the server takes requests.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    started, stop = threading.Event(), threading.Event()
    failed = []

    async def serve():
        async with fake_engine() as engine:
            service = Service(engine.client, None, model)
            if change is not None:
                change(service, engine)
            app = make_app(service, ApiKeys(keys))
            config = uvicorn.Config(app, log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None
            task = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)
            server.should_exit = True
            await task

    def run():
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            started.set()
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        assert not failed, failed
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join(20)
        listener.close()
