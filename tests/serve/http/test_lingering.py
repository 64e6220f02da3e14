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


def test_bytes_of_one_turn_are_sent_by_one_write_and_before_the_end():
    async def run():
        inner = Transport()
        transport = LingeringTransport(inner, Lingering(1, 1.0), lambda: False)
        transport.write(b"status, ")
        transport.write(b"first event")
        assert inner.done == []
        await asyncio.sleep(0)
        assert inner.done == [("write", b"status, first event")]
        transport.write(b"last event")
        transport.close()
        assert inner.done[1:] == [("write", b"last event"), ("close",)]
        transport.write(b"too late")
        await asyncio.sleep(0)
        assert len(inner.done) == 3

    asyncio.run(run())


def test_bytes_are_sent_before_a_connection_lingers():
    async def run():
        inner = Transport()
        transport = LingeringTransport(inner, Lingering(1, 1.0), lambda: True)
        transport.write(b"refused")
        transport.close()
        assert inner.done == [("write", b"refused"), ("write_eof",), ("resume_reading",)]
        transport.close()
        assert inner.done[3:] == [("close",)]

    asyncio.run(run())
