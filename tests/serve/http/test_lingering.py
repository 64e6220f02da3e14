import asyncio

from jaxkv.serve.http.lingering import Lingering, LingeringTransport


class Transport:
    """Records what is done to it."""

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        return lambda *given: self.done.append((name, *given))

    def is_closing(self):
        return ("close",) in self.done


def test_a_status_is_sent_with_what_follows_in_its_turn_and_else_alone():
    status = b"HTTP/1.1 200 OK\r\n\r\n"

    async def run():
        inner = Transport()
        transport = LingeringTransport(inner, Lingering(1, 1.0), lambda: False)
        transport.write(status)
        assert inner.done == []
        transport.write(b"first event")
        assert inner.done == [("write", status + b"first event")]
        transport.write(b"second event")
        assert inner.done[1:] == [("write", b"second event")]
        transport.write(status)
        await asyncio.sleep(0)
        assert inner.done[2:] == [("write", status)]
        transport.write(status)
        transport.close()
        assert inner.done[3:] == [("write", status), ("close",)]
        transport.write(b"too late")
        await asyncio.sleep(0)
        assert len(inner.done) == 5

    asyncio.run(run())


def test_bytes_are_sent_before_a_connection_lingers():
    async def run():
        inner = Transport()
        transport = LingeringTransport(inner, Lingering(1, 1.0), lambda: True)
        transport.write(b"HTTP/1.1 408")
        transport.close()
        assert inner.done == [("write", b"HTTP/1.1 408"), ("write_eof",), ("resume_reading",)]
        transport.close()
        assert inner.done[3:] == [("close",)]

    asyncio.run(run())
