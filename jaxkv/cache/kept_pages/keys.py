"""Keys of full pages: SHA-256 over the parent's key and the page's tokens, chained from a secret root.

Two pages have equal keys only if all tokens from the first one to the end of the page are equal.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.cache.spec import CacheLayout

_SCHEMA = "jaxkv prefix 1"
_LENGTH = struct.Struct("<q").pack
_TOKEN_BYTES = 4


class PageKey(NamedTuple):
    """The key of one full page.

    Attributes:
        parent: digest of the page before it; of the root for the first page.
        digest: its own digest, 256 bits.
        tokens: its tokens as little-endian int32, compared on every hit.
    """

    parent: bytes
    digest: bytes
    tokens: bytes


def hash_parts(*parts: str | bytes | int | None) -> bytes:
    """Returns SHA-256 over the parts. Each part is prefixed by its type and length, so distinct lists never collide."""
    framed = b""
    for part in parts:
        if isinstance(part, bytes):
            kind, data = b"b", part
        else:
            kind = type(part).__name__[0].encode()  # s, i or N
            data = b"" if part is None else str(part).encode()
        framed += kind + _LENGTH(len(data)) + data
    return hashlib.sha256(framed).digest()


def cache_root(secret: bytes, layout: CacheLayout, identity: str) -> bytes:
    """Returns the root digest of all keys of a cache.

    Args:
        secret: random bytes, one draw per process, so that clients cannot guess keys or construct collisions.
        layout: the groups of the cache.
        identity: the model, its weights, and everything else that changes the contents of a page of given tokens.
    """
    return hash_parts(_SCHEMA, secret, identity, repr(layout))


def page_key(parent: bytes, tokens: bytes) -> PageKey:
    """Returns the key of the page that follows `parent` and holds these tokens."""
    return PageKey(parent, hash_parts(parent, tokens), tokens)


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Returns token ids as little-endian int32.

    Raises:
        ValueError: an id does not fit int32; wrapped ids would collide.
    """
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids must be integers that fit int32: {error}") from error


class PageKeys:
    """The page keys of one token sequence; each page is hashed once. `truncate` follows tokens that are taken back.

    Made by `PrefixIndex.keys`. One object serves one sequence for its whole life, preemptions included.
    Only its methods set the attributes.

    Attributes:
        epoch: epoch of the index when the sequence began; `None` before it begins.
        published: tokens of the sequence that were published to the index.
        shared_tokens: length of the longest prefix shared with an earlier prompt; `None` before `plan`.
        places: lengths, in tokens, at which the sequence makes a checkpoint.
    """

    def __init__(self, root: bytes, salt: str | bytes | None) -> None:
        self._root = root
        self._salt = salt
        self._chains: dict[int, list[PageKey]] = {}
        self.epoch: int | None = None
        self.published = 0
        self.shared_tokens: int | None = None
        self.places: tuple[int, ...] = ()
        self._beginning: tuple[int, int, int] | None = None
        self._deferred = False

    def begin(self, epoch: int, reused: int, computed: int, stateless: int) -> None:
        """Begins the sequence, also after a preemption.

        Args:
            epoch: epoch of the index.
            reused: tokens that the sequence shares with the index.
            computed: its other tokens.
            stateless: of these, tokens whose pages are cached without a checkpoint.
        """
        self.epoch, self.published = epoch, reused
        self._beginning = reused, computed, stateless

    def take_beginning(self) -> tuple[int, int, int] | None:
        """Returns (reused, computed, stateless) of the last `begin`; `None` if they were taken already."""
        beginning, self._beginning = self._beginning, None
        return beginning

    def note_published(self, num_tokens: int) -> int:
        """Sets the number of published tokens, and returns the previous one."""
        before, self.published = self.published, num_tokens
        return before

    def plan(self, shared_tokens: int, places: tuple[int, ...]) -> None:
        """Sets the length of the shared prefix and the lengths at which the sequence makes a checkpoint."""
        self.shared_tokens, self.places = shared_tokens, places

    def defer(self) -> bool:
        """Notes that the request waits for a checkpoint of another sequence; returns whether it is the first time."""
        first, self._deferred = not self._deferred, True
        return first

    def pages(self, tokens: Sequence[int], page_size: int, num_tokens: int) -> list[PageKey]:
        """Returns the keys of the full pages among the first `num_tokens`; the caller must not change the list."""
        count = num_tokens // page_size
        chain = self._chain(tokens, page_size, count)
        return chain if count == len(chain) else chain[:count]

    def parent(self, tokens: Sequence[int], page_size: int, full: int) -> bytes:
        """Returns the digest of page `full - 1`; of the root if `full` is 0."""
        if not full:
            return hash_parts(self._root, page_size, self._salt)
        return self._chain(tokens, page_size, full)[full - 1].digest

    def copy(self) -> "PageKeys":
        """Returns the keys of a fork, whose tokens are equal so far."""
        twin = PageKeys(self._root, self._salt)
        twin._chains = {page_size: list(chain) for page_size, chain in self._chains.items()}
        twin.epoch, twin.published = self.epoch, self.published
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Forgets the pages past the first `num_tokens` tokens, which other tokens may follow from now on."""
        for page_size, chain in self._chains.items():
            del chain[num_tokens // page_size :]
        self.published = min(self.published, num_tokens)

    def _chain(self, tokens: Sequence[int], page_size: int, count: int) -> list[PageKey]:
        """Returns the keys of all pages hashed so far, extended to at least `count` pages."""
        chain = self._chains.setdefault(page_size, [])
        if len(chain) >= count:
            return chain
        missing = encode_tokens(tokens[len(chain) * page_size : count * page_size])
        parent = chain[-1].digest if chain else self.parent(tokens, page_size, 0)
        page_bytes = page_size * _TOKEN_BYTES
        for start in range(0, len(missing), page_bytes):
            chain.append(page_key(parent, missing[start : start + page_bytes]))
            parent = chain[-1].digest
        return chain
