"""Starts the engine process and joins it to this one: neither lives without the other."""

import asyncio
import os
import socket
import subprocess
import sys

from jaxkv.serve.engine_client import EngineClient
from jaxkv.serve.wire import Start, frame


class EngineProcess:
    """A running engine process.

    Args:
        start: what it loads.

    Attributes:
        client: talks to it.
    """

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxkv.serve.engine_program", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        ours.sendall(frame(start))
        self.client = EngineClient(ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def end(self, seconds: float = 15.0) -> None:
        """Closes the connection, which ends the process; kills it if it is still there after `seconds`."""
        await self.client.close()
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
