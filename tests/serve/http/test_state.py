import asyncio

from jaxkv import __version__
from tests.serve.http.serving import serving


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
