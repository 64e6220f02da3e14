"""Starts the engine process and connects it to this one; when either ends, the other ends too."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

from jaxkv.replicas.devices import child_environment
from jaxkv.serve import exit_codes
from jaxkv.serve.engine_client import EngineClient
from jaxkv.serve.wire import Start, frame

_CODES = {
    exit_codes.REFUSED,
    exit_codes.OUT_OF_MEMORY,
    exit_codes.DEVICE_BROKEN,
    exit_codes.HUNG,
}


class EngineProcess:
    """A running engine process.

    Args:
        start: what it loads.
        program: the module that it runs.
        environment: further variables.

    Attributes:
        client: sends it requests and receives its tokens.

    Raises:
        OSError: no process could be started.
    """

    def __init__(
        self,
        start: Start,
        program: str = "jaxkv.serve.engine_program",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: a file of the current folder must not stand in for a module.
                    [sys.executable, "-P", "-m", program, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**child_environment(), **environment},
                    # A terminal's Ctrl-C is for the HTTP process, which then ends this one in order.
                    process_group=0,
                )
                ours.sendall(frame(start))
            except BaseException:
                ours.close()
                raise
        self.client = EngineClient(ours)

    async def end(self, seconds: float = 15.0) -> int:
        """Closes the connection, which ends the process; kills it if it is still there after `seconds`.

        Returns:
            The exit code for the server, if its engine process ended by itself: see `jaxkv.serve.exit_codes`.
        """
        reported = self.client.exit_code
        await self.client.close()
        try:
            code = await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = await asyncio.to_thread(self._process.wait)
        return code if reported == exit_codes.FAILED and code in _CODES else reported
