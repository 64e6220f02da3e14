"""A server whose answers come at known times, in an event loop whose time only passes while nothing else can happen."""

import asyncio
import contextlib
import json
import selectors

from jaxkv.bench.client.measure import LoadTest, measure_server

DONE = b"data: [DONE]\n\n"


class _Selector(selectors.DefaultSelector):
    """Never waits: the time that it would wait passes at once."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        assert timeout is not None, "nothing is left that could ever happen"
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its connections go to a Unix socket, over which bytes arrive before the sender goes on."""

    def __init__(self, path):
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._path = path
        self.refuse_after = None
        self._connections = 0

    def time(self):
        return self._virtual.now

    async def create_connection(self, factory, host=None, port=None, **options):
        self._connections += 1
        if self.refuse_after is not None and self._connections > self.refuse_after:
            raise ConnectionRefusedError(111, "Connect call failed")
        return await self.create_unix_connection(factory, self._path)


def event(text=" a", *, finish=None, chat=False, **more):
    """Returns the bytes of an event with a piece of text."""
    part = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, "finish_reason": finish, **part}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(prompt, output, cached=None):
    """Returns the bytes of the event with the counts of tokens."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def answer(*gaps, prompt=7, output=None, cached=None):
    """Returns the script of an answer with an event after each of these gaps in seconds."""
    ends = [None] * (len(gaps) - 1) + ["length"]
    script = [(gap, event(finish=end)) for gap, end in zip(gaps, ends, strict=True)]
    return [*script, (0, usage(prompt, output or len(gaps), cached) + DONE)]


class ScriptedServer:
    """Answers the n-th request by the n-th script, and the list of models by itself.

    A script is a list of pairs, seconds and bytes of the body; `None` for bytes closes the connection. A status, or a
    pair of a status and a text, is an error.

    Attributes:
        scripts: of the answers.
        models: of the list of models.
        requests: bodies of the requests.
        arrived: times of their arrivals.
        most_at_once: the largest number of requests that it answered at once.
    """

    def __init__(self, scripts, models=({"id": "m"},)):
        self.scripts = scripts
        self.models = models
        self.requests, self.arrived = [], []
        self.most_at_once = self._running = 0

    async def __call__(self, reader, writer):
        # The client may give up.
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /v1/models"):
                await self._send(writer, 200, json.dumps({"data": self.models}))
                return
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.requests.append(json.loads(await reader.readexactly(length)))
            self.arrived.append(asyncio.get_running_loop().time())
            script = self.scripts[len(self.requests) - 1]
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            await self._play(writer, script)
            self._running -= 1

    async def _play(self, writer, script):
        if isinstance(script, bytes):
            writer.write(script)
        elif isinstance(script, int | tuple):
            status, text = script if isinstance(script, tuple) else (script, "")
            await self._send(writer, status, text)
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                b"Connection: close\r\n\r\n"
            )
            for seconds, body in script:
                if seconds:
                    await asyncio.sleep(seconds)
                if body is None:
                    return
                writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _send(self, writer, status, text):
        body = text.encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()


class Measured:
    """What `measure_server` reported."""

    def __init__(self):
        self.runs, self.notes, self.whole = [], [], None


def measure(tmp_path, server, *, cancel_at=None, refuse_after=None, **options):
    """Measures a scripted server in virtual time; token ids are sent unless options say otherwise."""
    options = {"base_url": "http://server", "vocab_size": 50, **options}
    path, told = str(tmp_path / "socket"), Measured()

    async def main():
        loop = asyncio.get_running_loop()
        loop.refuse_after = refuse_after
        async with await asyncio.start_unix_server(server, path):
            task = asyncio.current_task()
            if cancel_at is not None:
                loop.call_at(cancel_at, task.cancel)
            told.whole = await measure_server(
                LoadTest(**options),
                report=told.runs.append,
                note=told.notes.append,
                status=lambda text: None,
                clock=loop.time,
            )

    async def main_and_the_rest():
        try:
            await main()
        finally:
            # Handlers of requests that were given up end too, and connections close.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(path)) as runner:
        runner.run(main_and_the_rest())
    return told
