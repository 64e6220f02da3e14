import asyncio

from jaxkv import __version__
from tests.serve.http.serving import CHATTY, serving


def test_health_ready_version_and_models_answer():
    async def run():
        async with serving() as server:
            assert (await server.http.get("/health")).json() == {"status": "ok"}
            assert (await server.http.get("/ready")).json() == {"status": "ready"}
            assert (await server.http.get("/version")).json() == {"version": __version__}
            [model] = (await server.http.get("/v1/models")).json()["data"]
            assert (await server.http.get("/v1/models/tiny")).json() == model
            assert model["id"] == "tiny"
            assert model["max_model_len"] == 1024
            missing = await server.http.get("/v1/models/other/one")
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )

    asyncio.run(run())


def test_adapters_are_models_whose_parent_is_the_served_one():
    async def run():
        async with serving(tokenizer=CHATTY) as server:
            server.service.adapters = ("sql", "chat")
            listed = (await server.http.get("/v1/models")).json()["data"]
            told = [(model["id"], model["root"], model["parent"]) for model in listed]
            assert told == [
                ("tiny", "tiny", None),
                ("sql", "sql", "tiny"),
                ("chat", "chat", "tiny"),
            ]
            assert (await server.http.get("/v1/models/chat")).json() == listed[2]
            missing = await server.http.get("/v1/models/other")
            assert "'tiny', and its adapters are sql, chat" in missing.json()["error"]["message"]
            for name, lora in (("tiny", None), ("sql", "sql")):
                chat = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
                for path, given in (
                    ("/v1/completions", {"model": name, "prompt": "hi"}),
                    ("/v1/chat/completions", chat),
                ):
                    reply = await server.http.post(path, json=given | {"max_tokens": 1})
                    assert reply.status_code == 200, reply.text
                    assert reply.json()["model"] == name
                    *_, call = server.engine.calls.values()
                    assert call.sampling.get("lora") == lora

    asyncio.run(run())


def test_a_draining_server_is_healthy_but_not_ready():
    async def run():
        async with serving() as server:
            server.service.draining = True
            assert (await server.http.get("/health")).status_code == 200
            reply = await server.http.get("/ready")
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")

    asyncio.run(run())


def test_a_lost_engine_makes_health_and_ready_fail():
    async def run():
        async with serving() as server:
            await server.engine.die()
            await server.engine.client.wait_lost()
            for path in ("/health", "/ready", "/v1/models"):
                reply = await server.http.get(path)
                assert reply.status_code == 503, path
                assert reply.json()["error"]["code"] == "engine_unavailable"

    asyncio.run(run())
