import asyncio
import json
import socket

import pytest

from jaxkv.serve.http.limits import Limits
from tests.serve.http.listening import listening

GET = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


def status(reply):
    """Returns the status and the error's code of a raw reply."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"x-request-id" in head, reply
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (GET + b"a: b\r\n" * 200 + b"\r\n", (431, "headers_too_large")),
        (GET + b"a: " + b"b" * 40000 + b"\r\n\r\n", (431, "headers_too_large")),
        (b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\n\r\n", (431, "headers_too_large")),
        (GET + b"a: " + b"b" * 40000, (431, "headers_too_large")),
        (b"GET /" + b"a" * 40000, (431, "headers_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, "invalid_http")),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, "invalid_http")),
        (b"CONNECT evil:80 HTTP/1.1\r\nhost: a\r\n\r\n", (400, "invalid_http")),
        (b"nonsense\r\n\r\n", (400, "invalid_http")),
        (GET + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n", (400, "invalid_http")),
        (POST + b"content-length: -1\r\n\r\n", (400, "invalid_http")),
        (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", (400, "invalid_http")),
        (POST + b"content-length: 99999999999\r\n\r\n", (413, "body_too_large")),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n", (400, "invalid_http")),
    ],
)
def test_hostile_bytes_are_refused_with_an_error_body(sent, wanted):
    async def run():
        async with listening() as server:
            assert status(await server.exchange(sent)) == wanted
            assert (await server.exchange(GET + b"\r\n")).startswith(b"HTTP/1.1 200")
            assert not server.engine.calls

    asyncio.run(run())


def test_garbage_between_chunks_of_a_body_ends_the_connection():
    async def run():
        async with listening() as server:
            sent = POST + b"transfer-encoding: chunked\r\n\r\n"
            assert status(await server.exchange(sent, b"zz\r\n")) == (400, "invalid_http")
            assert not server.engine.calls

    asyncio.run(run())


def test_a_client_that_sends_its_headers_or_body_too_slowly_is_answered_408():
    limits = Limits(head_seconds=0.2, body_seconds=0.2)

    async def run():
        async with listening(limits=limits) as server:
            for start, piece in (
                (b"GET /health HTTP/1.1\r\n", b"a: b\r\n"),
                (POST + b"content-length: 100\r\n\r\n", b"{"),
                (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
            ):
                reply = await server.exchange(start, *[piece] * 60, wait=0.05)
                assert status(reply) == (408, "request_timeout")
            assert status(await server.exchange(b"")) == (408, "request_timeout")

    asyncio.run(run())


def test_pipelined_requests_are_answered_in_order():
    async def run():
        async with listening() as server:
            one = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
            reply = await server.exchange(one * 3 + GET + b"\r\n")
            assert reply.count(b"HTTP/1.1 200") == 4
            assert reply.endswith(b'{"status":"ok"}')

    asyncio.run(run())


def test_a_connection_beyond_the_cap_is_answered_503_and_others_go_on():
    async def run():
        async with listening(limits=Limits(connections=20)) as server:
            held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
            # The server has taken all of them when each has answered.
            for reader, writer in held:
                writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert status(await server.exchange(b"")) == (503, "too_many_connections")
            reader, writer = held[0]
            writer.close()
            await writer.wait_closed()
            while len(server.uvicorn.server_state.connections) >= 20:
                await asyncio.sleep(0.01)
            assert (await server.exchange(GET + b"\r\n")).startswith(b"HTTP/1.1 200")
            for _, writer in held:
                writer.close()

    asyncio.run(run())


async def refused(server, sent=b""):
    """Returns a socket whose connection was refused, and the reply; the client has not closed its end."""
    client = socket.create_connection(("127.0.0.1", server.port))
    client.setblocking(False)
    loop, reply = asyncio.get_running_loop(), b""
    await loop.sock_sendall(client, sent)
    while part := await asyncio.wait_for(loop.sock_recv(client, 2**16), 20):
        reply += part
    return client, reply


@pytest.mark.parametrize(
    ("limits", "sent", "wanted"),
    [
        (Limits(connections=1), b"", (503, "too_many_connections")),
        (Limits(), b"nonsense\r\n\r\n", (400, "invalid_http")),
        (Limits(), POST + b"content-length: 99999999\r\n\r\n{", (413, "body_too_large")),
        (Limits(body_seconds=0.1), POST + b"content-length: 9\r\n\r\n{", (408, "request_timeout")),
    ],
)
def test_a_client_that_still_sends_when_it_is_refused_can_read_why(limits, sent, wanted):
    async def run():
        async with listening(limits=limits) as server:
            held = await asyncio.open_connection("127.0.0.1", server.port)
            client, reply = await refused(server, sent)
            with client:
                assert status(reply) == wanted
                # A closed socket answers the first of these with a reset, at which the second one fails.
                for _ in range(2):
                    client.send(b"x" * 1000)
            held[1].close()
            while server.uvicorn.server_state.connections:
                await asyncio.sleep(0.01)
            assert not server.engine.calls

    asyncio.run(run())


@pytest.mark.parametrize(("most", "seconds", "left"), [(1, 1000.0, 1), (10, 0.1, 0)])
def test_a_refused_client_that_does_not_close_is_closed_when_its_time_is_over_or_others_come(
    most, seconds, left
):
    limits = Limits(connections=1, lingering=most, linger_seconds=seconds)

    async def run():
        async with listening(limits=limits) as server:
            held = await asyncio.open_connection("127.0.0.1", server.port)
            clients = [(await refused(server))[0] for _ in range(3)]
            while len(server.uvicorn.server_state.connections) > left + 1:
                await asyncio.sleep(0.01)
            # Those that are only there to be read take nobody's place.
            held[1].close()
            while len(server.uvicorn.server_state.connections) > left:
                await asyncio.sleep(0.01)
            assert (await server.exchange(GET + b"\r\n")).startswith(b"HTTP/1.1 200")
            for client in clients:
                client.close()

    asyncio.run(run())
