"""Names for full pages of tokens: hashes chained from a secret, so that equal names mean equal texts from the start.

Knows no pool and no sequence.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.cache.spec import CacheLayout

_SCHEMA = "jaxkv prefix 1"


class PageKey(NamedTuple):
    """The name of one full page.

    Attributes:
        parent: name of the page before it; of the root, for the first.
        digest: its own name, 256 bits.
        tokens: its tokens as little-endian int32, compared on every hit.
    """

    parent: bytes
    digest: bytes
    tokens: bytes


def hash_parts(*parts: str | bytes | int | None) -> bytes:
    """Returns SHA-256 over the parts, each with its type and length, so that no two lists of parts read the same."""
    hasher = hashlib.sha256()
    for part in parts:
        kind = type(part).__name__[0].encode()  # s, b, i or N
        data = part if isinstance(part, bytes) else b"" if part is None else str(part).encode()
        hasher.update(kind + struct.pack("<q", len(data)) + data)
    return hasher.digest()


def cache_root(secret: bytes, layout: CacheLayout, identity: str) -> bytes:
    """Returns what all keys of a cache start from.

    Args:
        secret: random per process, so that nobody outside can guess or collide keys.
        layout: the groups; pages of another layout would mean nothing here.
        identity: the model, its weights and whatever else changes what a page of given tokens holds.
    """
    return hash_parts(_SCHEMA, secret, identity, repr(layout))


def page_key(parent: bytes, tokens: bytes) -> PageKey:
    """Returns the key of the page that follows `parent` and holds these tokens."""
    return PageKey(parent, hash_parts(parent, tokens), tokens)


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Returns ids as little-endian int32; refuses others, which would collide when wrapped."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids must be integers that fit int32: {error}") from error


class PageKeys:
    """The keys of one text that only grows; each page is hashed once.

    Made by `PrefixIndex.keys`. Keep it as long as the text, preemptions included, and give it that text alone.

    Attributes:
        epoch: epoch of the index in which the sequence that computes the text began; `None` before. The index sets it.
        published: tokens of that sequence that the index has been told of.
        begun: tokens that the sequence found, did not find, and had pages of but no states, until the index has
            counted them.
        agreed: tokens that an earlier text began with, too; `None` before the index has looked.
        places: numbers of tokens after which the sequence leaves a checkpoint behind.
        deferred: the text has waited for another's checkpoint. The index sets all three.
    """

    def __init__(self, root: bytes, salt: str | bytes | None) -> None:
        self._root = root
        self._salt = salt
        self._chains: dict[int, list[PageKey]] = {}
        self.epoch: int | None = None
        self.published = 0
        self.begun: tuple[int, int, int] | None = None
        self.agreed: int | None = None
        self.places: tuple[int, ...] = ()
        self.deferred = False

    def pages(self, tokens: Sequence[int], page_size: int, num_tokens: int) -> list[PageKey]:
        """Returns the key of each full page among the first `num_tokens`; the list is not the caller's to change."""
        count = num_tokens // page_size
        chain = self._chain(tokens, page_size, count)
        return chain if count == len(chain) else chain[:count]

    def parent(self, tokens: Sequence[int], page_size: int, full: int) -> bytes:
        """Returns the name of the last of the first `full` pages; of the root, for none."""
        if not full:
            return hash_parts(self._root, page_size, self._salt)
        return self._chain(tokens, page_size, full)[full - 1].digest

    def copy(self) -> "PageKeys":
        """Returns the keys of a text that has been the same so far, as a fork's."""
        twin = PageKeys(self._root, self._salt)
        twin._chains = {page_size: list(chain) for page_size, chain in self._chains.items()}
        twin.epoch, twin.published = self.epoch, self.published
        return twin

    def _chain(self, tokens: Sequence[int], page_size: int, count: int) -> list[PageKey]:
        """Returns the keys of all pages that were named so far, at least of the first `count`."""
        chain = self._chains.setdefault(page_size, [])
        for index in range(len(chain), count):
            parent = chain[-1].digest if chain else self.parent(tokens, page_size, 0)
            page = encode_tokens(tokens[index * page_size : (index + 1) * page_size])
            chain.append(page_key(parent, page))
        return chain
