import asyncio
import json
import re
import threading

import pytest

from jaxkv.serve.http import request
from jaxkv.serve.http.json_body import parse_json
from jaxkv.serve.http.request import LARGE_BODY
from tests.serve.http.hostile import BIG, MESSAGES, REQUESTS, SECRET
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
        async with serving(raises=False) as server:

            def fail(*given, **options):
                raise RuntimeError(f"broken at /srv/x with {SECRET}")

            monkeypatch.setattr(server.service, "begin", fail)
            for stream in (False, True):
                given = {"model": "tiny", "prompt": "x", "stream": stream}
                reply = await server.http.post("/v1/completions", json=given)
                assert reply.status_code == 500
                error = reply.json()["error"]
                assert error["code"] == "internal_error"
                assert reply.headers["x-request-id"] in error["message"]
                assert "broken" not in reply.text

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
