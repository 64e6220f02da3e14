"""`Request`: what a handler is given, and the reading of a request's body within the limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from jaxkv.serve.http.auth import prefix_salt
from jaxkv.serve.http.errors import ApiError
from jaxkv.serve.http.json_body import parse_json
from jaxkv.serve.http.limits import Limits

REQUEST_ID = "jaxkv.request_id"
TENANT = "jaxkv.tenant"
"""Keys of the ASGI scope that the outer wrapper sets."""


LARGE_BODY = 64 * 2**10
"""Bytes of a body from which its JSON is read in a thread; reading that many takes about a millisecond."""


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class Request:
    """One request whose body has arrived.

    Attributes:
        id: its number in logs and in the header `x-request-id`.
        path: variables of the path.
        headers: name, in lower case, -> value; of several the last.
        body: its bytes.
        tenant: see `ApiKeys.tenant`.
        limits: bounds on what it may hold.
        tree: what `json` returns, once it was read; `None` before.
    """

    id: str
    path: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    tenant: bytes
    limits: Limits
    tree: Mapping[str, Any] | None = None

    def json(self) -> dict[str, Any]:
        """Returns the body's JSON object.

        Raises:
            ApiError: 415 for another content type, 400 for anything but a strict JSON object.
        """
        if self.tree is not None:
            return dict(self.tree)
        content = self.headers.get("content-type", "")
        media, _, options = content.partition(";")
        charset = options.strip().lower().removeprefix("charset=").strip('"')
        if media.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
            raise ApiError(
                415,
                "unsupported_media_type",
                "the content type must be application/json in UTF-8",
            )
        return parse_json(self.body, self.limits.json_depth)

    def salt(self, cache_salt: str | None = None) -> bytes | None:
        """Returns the salt of this request's cached pages, see `prefix_salt`."""
        return prefix_salt(self.tenant, cache_salt)


async def receive_request(scope: Scope, receive: Receive, limits: Limits) -> Request:
    """Reads a request's body.

    Raises:
        ApiError: 413 if the body is longer than `limits.body_bytes`.
        ClientGone: the client went before its end.
    """
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limits.body_bytes:
        raise _too_long(limits)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limits.body_bytes:
            raise _too_long(limits)
    return Request(
        id=scope[REQUEST_ID],
        path=scope.get("path_params", {}),
        headers=headers,
        body=bytes(body),
        tenant=scope[TENANT],
        limits=limits,
    )


def _too_long(limits: Limits) -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        f"the body is too long, at most {limits.body_bytes} bytes are read",
        headers={"connection": "close"},
    )
