"""API keys: who may call what, and the salt that keeps the cached pages of different keys apart."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping

from starlette.types import Scope

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The only paths that need no key."""

BROWSER_PATHS = frozenset({"/dashboard", "/dashboard/data"})
"""The only paths that take a key as the password of HTTP Basic, so that a browser asks for it.

A browser sends that password by itself, even where another site's page made the request. These paths only read, and no
other site can read their replies. On all other paths a key must be sent on purpose.
"""

_FEWEST_CHARACTERS = 8


class ApiKeys:
    """The keys that open the server; without any, everybody may call everything.

    Only their SHA-256 is kept, and all of them are compared, in constant time.

    Args:
        keys: the keys, each of at least 8 visible ASCII characters.

    Raises:
        ValueError: a key is too short, or has characters that no header can carry.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests: list[bytes] = []
        for key in keys:
            if len(key) < _FEWEST_CHARACTERS or not all("!" <= each <= "~" for each in key):
                raise ValueError(
                    f"an API key must have at least {_FEWEST_CHARACTERS} visible ASCII characters and no spaces, "
                    f"got one of {len(key)} characters"
                )
            self._digests.append(hashlib.sha256(key.encode()).digest())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(
        self, headers: Iterable[tuple[bytes, bytes]], *, basic: bool = False
    ) -> bytes | None:
        """Returns the digest of the request's key, empty if no keys are needed; `None` if it has no valid one.

        Args:
            headers: the request's headers. The key is `Authorization: Bearer KEY` or `x-api-key: KEY`; of several, the
                first valid one counts.
            basic: a key may also be the password of HTTP Basic; see `BROWSER_PATHS`.
        """
        if not self._digests:
            return b""
        for name, value in headers:
            if (key := _key(name, value, basic)) is not None and (
                found := self._digest(key)
            ) is not None:
                return found
        return None

    def _digest(self, key: bytes) -> bytes | None:
        """Returns the digest of a key; `None` if it is unknown. The time does not depend on which one it is."""
        digest, found = hashlib.sha256(key).digest(), None
        for known in self._digests:
            if hmac.compare_digest(digest, known):
                found = known
        return found


def is_open(scope: Scope) -> bool:
    """Whether a request needs no key: its path is one of `OPEN_PATHS`, written without any escapes."""
    path = scope["path"]
    return scope["type"] == "http" and path in OPEN_PATHS and scope.get("raw_path") == path.encode()


def prefix_salt(tenant: bytes, cache_salt: str | None) -> bytes | None:
    """Returns the salt of a request's cached pages: requests share pages only if key and `cache_salt` are equal.

    Args:
        tenant: what `ApiKeys.tenant` returned.
        cache_salt: cache salt of the request; `None` if it has none.

    Returns:
        The salt; `None` for requests without either, which all share.
    """
    if not tenant and cache_salt is None:
        return None
    chosen = b"" if cache_salt is None else b"=" + cache_salt.encode()
    return hmac.digest(tenant, b"jaxkv prefix salt" + chosen, "sha256")


def takes_basic(scope: Scope) -> bool:
    """Whether a request may have its key as the password of HTTP Basic."""
    return scope["path"] in BROWSER_PATHS


def challenge(scope: Scope) -> Mapping[str, str]:
    """Returns the headers of a 401."""
    if takes_basic(scope):
        return {"www-authenticate": 'Basic realm="jaxkv: any name, the API key as password"'}
    return {"www-authenticate": "Bearer"}


def _key(name: bytes, value: bytes, basic: bool) -> bytes | None:
    """Returns the key that a header carries; `None` for other headers."""
    name = name.lower()
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization":
        scheme, _, key = value.strip().partition(b" ")
        if basic and scheme.lower() == b"basic":
            return _password(key.strip())
        return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _password(credentials: bytes) -> bytes | None:
    """Returns the password of HTTP Basic's credentials, base64 of "name:password"; `None` if they are malformed."""
    try:
        pair = base64.b64decode(credentials, validate=True)
    except binascii.Error:
        return None
    return pair.partition(b":")[2]
