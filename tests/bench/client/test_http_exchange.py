"""Connections of the load client are used again, and one that cannot be is replaced without an error."""

import asyncio

import pytest

from jaxkv.bench.client import http_exchange
from jaxkv.bench.client.http_exchange import ExchangeFailed, Server, exchange, open_idle

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"4\r\ndone\r\n0\r\n\r\n"
CLOSING = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + b"4\r\ndone\r\n0\r\n\r\n"


def answered(*answers, requests=2):
    """Returns the bodies of requests one after the other, and the connections; `answers` are those of each connection.

    A connection is closed after its last answer.
    """
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        for answer in answers[len(connections) - 1]:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if len(answers[len(connections) - 1]) < requests:
            writer.close()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            server = Server(host="127.0.0.1", port=listening.sockets[0].getsockname()[1])
            bodies = []
            for _ in range(requests):
                got = []

                def take(one, part, got=got):
                    got.append(part)
                    if b"done" in part:
                        one.finish()

                await exchange(server, "/", None, take)
                bodies.append(b"".join(got))
                await asyncio.sleep(0.05)
            idle = len(server.idle)
            server.close()
            for writer in connections:
                writer.close()
        return bodies, len(connections), idle

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_a_second_request_takes_the_connection_of_the_first():
    assert answered([WHOLE, WHOLE]) == ([b"done", b"done"], 1, 1)


@pytest.mark.parametrize("first", [WHOLE, CLOSING])
def test_a_connection_that_the_server_closes_is_replaced(first):
    assert answered([first], [WHOLE]) == ([b"done", b"done"], 2, 0)


def test_a_connection_that_does_not_end_its_body_is_not_used_again(monkeypatch):
    monkeypatch.setattr(http_exchange, "_SECONDS_TO_END", 0.01)
    endless = WHOLE.removesuffix(b"0\r\n\r\n")
    assert answered([endless, endless], [endless, endless]) == ([b"done", b"done"], 2, 0)


def test_an_answer_that_breaks_off_is_not_asked_for_twice():
    with pytest.raises(ExchangeFailed, match="broke off"):
        answered([WHOLE, HEAD + b"4\r\ndo"], requests=3)


def test_a_connection_that_is_closed_as_the_request_comes_is_replaced():
    assert answered([WHOLE, b""], [WHOLE] * 3, requests=3) == ([b"done"] * 3, 2, 1)


def test_requests_take_the_connections_that_were_opened_before_and_others_open_their_own():
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(WHOLE)

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            server = Server(host="127.0.0.1", port=listening.sockets[0].getsockname()[1])
            await open_idle(server, 2)
            await open_idle(server, 2)
            opened = len(server.idle)
            sent = (exchange(server, "/", None, lambda one, part: None) for _ in range(3))
            ended = await asyncio.gather(*sent)
            server.close()
            for writer in connections:
                writer.close()
        return opened, [one.status for one in ended], len(connections)

    assert asyncio.run(asyncio.wait_for(run(), 20)) == (2, [200] * 3, 3)
