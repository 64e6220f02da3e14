"""The outermost ASGI application: it closes every path to requests without a key, and numbers all requests."""

import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.serve.http.auth import ApiKeys, challenge, is_open, takes_basic
from jaxkv.serve.http.errors import ApiError, ErrorForm, openai_error
from jaxkv.serve.http.replies import error_reply
from jaxkv.serve.http.request import REQUEST_ID, TENANT


class Guard:
    """Passes requests with a key on, and those of the open paths.

    Args:
        app: what is guarded.
        keys: the keys.
        forms: path -> form of its errors, where that is not OpenAI's.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, forms: Mapping[str, ErrorForm] | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._forms = dict(forms or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request as ASGI's."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # No route speaks another protocol.
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = secrets.token_hex(12)
        numbered = _numbered(send, request_id)
        tenant = self._keys.tenant(scope["headers"], basic=takes_basic(scope))
        if tenant is None and not is_open(scope):
            form = self._forms.get(scope["path"], openai_error)
            error = ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                headers=challenge(scope),
            )
            await error_reply(error, form, request_id).send(numbered)
            return
        inner = {**scope, REQUEST_ID: request_id, TENANT: tenant or b""}
        await self._app(inner, receive, numbered)


def _numbered(send: Send, request_id: str) -> Send:
    """Returns a `send` that adds the request's number to the headers of its reply."""

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return add
