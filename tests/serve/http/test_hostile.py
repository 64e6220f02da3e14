import asyncio
import json
import re
import threading

import httpx
import pytest

from jaxkv.serve.http import request
from jaxkv.serve.http.json_body import parse_json
from jaxkv.serve.http.request import LARGE_BODY
from jaxkv.serve.http.work import Work
from tests.serve.http.hostile import BIG, MESSAGES, REQUESTS, SECRET
from tests.serve.http.listening import listening
from tests.serve.http.serving import CHATTY, raw_request, serving

INTERNAL = re.compile(r"Traceback|jaxkv[/.]|site-packages|/tmp|/root|0x[0-9a-f]{6}|\.py\b|Error\(")


def test_hostile_requests_are_4xx_with_an_error_body_and_reach_no_engine(caplog):
    assert len(REQUESTS) > 400

    async def run():
        wrong = []
        async with serving(tokenizer=CHATTY) as server:
            for each in REQUESTS:
                shown = (each.path, each.body[:120], each.status, each.param)
                headers = each.headers.items()
                status, _, body = await raw_request(server, "POST", each.path, headers, each.body)
                if status != each.status:
                    wrong.append((*shown, status, body))
                    continue
                error = json.loads(body)["error"]
                # Anthropic's form of errors names the field in the message alone.
                named = error["message"] if each.path == MESSAGES else error["param"] or ""
                if each.param and each.param not in named:
                    wrong.append((*shown, error))
                text = body.decode()
                if SECRET in text or INTERNAL.search(text) or len(text) > 1000:
                    wrong.append((*shown, error))
            assert not wrong, "\n".join(map(str, wrong))
            assert not server.engine.calls
            assert (await server.http.get("/ready")).status_code == 200

    asyncio.run(run())
    assert SECRET not in caplog.text


def test_a_mistake_of_the_server_is_500_with_fixed_text(caplog, monkeypatch):
    async def run():
        # An application that raises makes the client of this test raise too.
        async with serving(tokenizer=CHATTY) as server:
            monkeypatch.setattr(server.service, "begin", _fail)
            question = [{"role": "user", "content": "x"}]
            for path, form, stream in (
                ("/v1/completions", {"prompt": "x"}, False),
                ("/v1/completions", {"prompt": "x"}, True),
                (MESSAGES, {"messages": question, "max_tokens": 4}, False),
            ):
                given = {"model": "tiny", "stream": stream, **form}
                caplog.clear()
                reply = await server.http.post(path, json=given)
                assert reply.status_code == 500
                error = reply.json()["error"]
                if path == MESSAGES:
                    assert error["type"] == "api_error"
                else:
                    assert error["code"] == "internal_error"
                number = reply.headers["x-request-id"]
                assert number in error["message"]
                assert "broken" not in reply.text
                [record] = [each for each in caplog.records if each.exc_info]
                assert number in record.getMessage()
                assert SECRET in caplog.text

    asyncio.run(run())


def _fail(*given, **options):
    raise RuntimeError(f"broken at /srv/x with {SECRET}")


def test_a_connection_is_usable_after_a_mistake_of_the_server(monkeypatch):
    async def run():
        async with listening() as server:
            monkeypatch.setattr(server.service, "begin", _fail)
            body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
            head = b"host: a\r\ncontent-type: application/json\r\n"
            post = b"POST /v1/completions HTTP/1.1\r\n%scontent-length: %d\r\n\r\n%s"
            get = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            reply = await server.exchange(post % (head, len(body), body) * 2 + get)
            assert reply.count(b"HTTP/1.1 500") == 2
            assert reply.endswith(b'{"status":"ok"}')

    asyncio.run(run())


def test_a_mistake_of_the_server_within_a_stream_cuts_the_stream(caplog, monkeypatch):
    async def run():
        async with listening(lambda submit: [5, 6], held=True) as server:
            given = {"model": "tiny", "prompt": [7], "stream": True}
            async with httpx.AsyncClient(base_url=server.url) as client:
                request = client.build_request("POST", "/v1/completions", json=given)
                asked = asyncio.create_task(client.send(request, stream=True))
                while not server.engine.running:
                    await asyncio.sleep(0)
                await server.engine.step()
                reply = await asked
                assert reply.status_code == 200
                monkeypatch.setattr(Work, "_checked", _fail)
                await server.engine.step()
                with pytest.raises(httpx.RemoteProtocolError):
                    await reply.aread()
            assert len([each for each in caplog.records if each.exc_info]) == 1

    asyncio.run(run())


def test_nulls_count_as_not_given():
    async def run():
        async with serving(tokenizer=CHATTY) as server:
            names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "tools", "user")
            given = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
            reply = await server.http.post(
                "/v1/chat/completions", json=given | dict.fromkeys(names) | {"suffix": None}
            )
            assert reply.status_code == 200, reply.text
            [call] = server.engine.calls.values()
            assert call.sampling == {"max_tokens": None}

    asyncio.run(run())


@pytest.mark.parametrize(("size", "in_a_thread"), [(100, False), (LARGE_BODY, True)])
def test_only_a_large_body_is_read_beside_the_event_loop(monkeypatch, size, in_a_thread):
    threads = []

    def parse(body, depth):
        threads.append(threading.current_thread())
        return parse_json(body, depth)

    monkeypatch.setattr(request, "parse_json", parse)

    async def run():
        async with serving(tokenizer=CHATTY) as server:
            body = {"model": "tiny", "prompt": "x", "user": "u"}
            text = json.dumps(body) + " " * size
            kind = {"content-type": "application/json"}
            for content, status in ((text, 200), (f"{text}]", 400)):
                reply = await server.http.post("/v1/completions", content=content, headers=kind)
                assert reply.status_code == status

    asyncio.run(run())
    assert [one is not threading.main_thread() for one in threads] == [in_a_thread] * 2


@pytest.mark.parametrize("size", [BIG])
def test_a_huge_list_of_token_ids_is_refused_with_the_numbers(size):
    async def run():
        async with serving() as server:
            given = {"model": "tiny", "prompt": [1] * size}
            reply = await server.http.post("/v1/completions", json=given)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "1000000" in error["message"]
            assert "1024" in error["message"]

    asyncio.run(run())
