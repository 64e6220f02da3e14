import asyncio
import json
from itertools import product

import pytest

from jaxkv.serve.api.app import OPERATIONS
from jaxkv.serve.http.auth import OPEN_PATHS, ApiKeys, prefix_salt
from tests.serve.http.serving import raw_request, serving

KEY, OTHER = "key-of-the-first", "key-of-the-second"
ODD = (
    "//health",
    "/health/",
    "/health/../v1/models",
    "/v1/../health",
    "/%68ealth",
    "/health%2f",
    "/health;x",
    "/HEALTH",
    "//v1/models",
    "/v1/models/",
    "/./v1/models",
    "/v1/%2e%2e/ready",
    "/",
    "/metrics",
    "/docs",
    "/nothing",
)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE")


def paths():
    return [each.path.replace("{model:path}", "tiny") for each in OPERATIONS]


def test_every_route_but_the_open_ones_is_401_without_a_valid_key():
    async def run():
        async with serving(keys=(KEY, OTHER)) as server:
            wrong = (
                {},
                {"authorization": "Bearer nope"},
                {"authorization": f"Basic {KEY}"},
                {"authorization": KEY},
                {"authorization": "Bearer"},
                {"x-api-key": ""},
                {"x-api-key": KEY[:-1]},
                {"authorization": f"Bearer {KEY}x"},
            )
            for path, method, headers in product((*paths(), *ODD), METHODS, wrong):
                case = (path, method, headers)
                status, told, body = await raw_request(server, method, path, headers.items())
                assert told["x-request-id"], case
                if path in OPEN_PATHS:
                    assert status == (200 if method in ("GET", "HEAD") else 405), case
                else:
                    assert status == 401, case
                    assert json.loads(body)["error"]["type"] == "authentication_error", case
            assert not server.engine.calls

    asyncio.run(run())


def test_each_key_opens_the_server_in_either_header():
    async def run():
        async with serving(keys=(KEY, OTHER)) as server:
            for key in (KEY, OTHER):
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    reply = await server.http.get("/v1/models", headers=headers)
                    assert reply.status_code == 200

    asyncio.run(run())


def test_the_rows_that_need_no_key_are_the_open_paths():
    assert {each.path for each in OPERATIONS if not each.needs_key} == OPEN_PATHS


def test_a_websocket_is_closed():
    async def run():
        async with serving(keys=(KEY,)) as server:
            sent = []

            async def send(message):
                sent.append(message)

            await server.app({"type": "websocket", "path": "/health", "headers": []}, None, send)
            assert sent == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(run())


def test_keys_never_share_cached_pages_and_one_key_shares_with_itself():
    keys = ApiKeys((KEY, OTHER))
    first, second = (
        keys.tenant([(b"authorization", b"Bearer " + key.encode())]) for key in (KEY, OTHER)
    )
    salts = [prefix_salt(tenant, salt) for tenant in (first, second) for salt in (None, "", "a")]
    assert len(set(salts)) == 6
    assert prefix_salt(first, "a") == prefix_salt(first, "a")
    assert prefix_salt(b"", None) is None
    assert prefix_salt(b"", "a") not in (None, *salts)


@pytest.mark.parametrize("key", ["", "short", "with a space in it", "schlüssel-lang"])
def test_a_key_that_is_short_or_fits_no_header_is_refused(key):
    with pytest.raises(ValueError, match="API key"):
        ApiKeys((key,))
