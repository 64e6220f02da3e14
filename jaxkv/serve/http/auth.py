"""API keys: who may call what, and the salt that keeps the cached pages of different keys apart."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from starlette.types import Scope

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The only paths that need no key."""

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

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Returns the digest of the request's key, empty if no keys are needed; `None` if it has no valid one.

        Args:
            headers: the request's headers. The key is `Authorization: Bearer KEY` or `x-api-key: KEY`; of several, the
                first valid one counts.
        """
        if not self._digests:
            return b""
        for name, value in headers:
            if (key := _key(name, value)) is not None and (found := self._digest(key)) is not None:
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
        cache_salt: of the request; `None` if it has none.

    Returns:
        The salt; `None` for requests without either, which all share.
    """
    if not tenant and cache_salt is None:
        return None
    chosen = b"" if cache_salt is None else b"=" + cache_salt.encode()
    return hmac.digest(tenant, b"jaxkv prefix salt" + chosen, "sha256")


def challenge() -> Mapping[str, str]:
    """Returns the headers of a 401."""
    return {"www-authenticate": "Bearer"}


def _key(name: bytes, value: bytes) -> bytes | None:
    """Returns the key that a header carries; `None` for other headers."""
    name = name.lower()
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization":
        scheme, _, key = value.strip().partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else None
    return None
