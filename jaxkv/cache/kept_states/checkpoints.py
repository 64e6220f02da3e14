"""Checkpoints: cached states of recurrent layers, found by the tokens that lead to them.

A checkpoint belongs to one prefix of exact length, which need not end at a page end. Its key is the key of the last
full page and the tokens after that page.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys, encode_tokens, hash_parts

_REMEMBERED = 4096
"""Number of latest evictions whose tick is recorded, for `explain`."""


class CheckpointKey(NamedTuple):
    """The key of a prefix of some length.

    Attributes:
        parent: digest of the last full page; of the root if there is no full page.
        tail: the tokens after that page as little-endian int32, compared on every hit.
        digest: its own digest, 256 bits.
        length: number of tokens of the prefix.
    """

    parent: bytes
    tail: bytes
    digest: bytes
    length: int


def checkpoint_key(
    keys: PageKeys, tokens: Sequence[int], length: int, page_size: int
) -> CheckpointKey:
    """Returns the key of the first `length` tokens, from the keys of their pages of `page_size` tokens."""
    full = length // page_size
    parent = keys.parent(tokens, page_size, full)
    tail = encode_tokens(tokens[full * page_size : length])
    return CheckpointKey(parent, tail, hash_parts("checkpoint", parent, tail), length)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """Cached states from which a sequence can begin after a prefix.

    Attributes:
        key: its key.
        states: recurrent group name -> id of the state after the prefix.
        tails: paged group name -> id of a page of its own with the last tokens, where the prefix ends inside a page.
        anchors: (paged group name, page digest) of the cached full pages that a hit on it needs.
        chain: keys of the full pages of its prefix. They hold its tokens, which a cache without pages has nowhere else.
        maker: number of the sequence that computed it.
        tick: tick of its last use.
        confirmed: the step that wrote it was collected without an error. No sequence begins from it before.
    """

    key: CheckpointKey
    states: Mapping[str, int]
    tails: Mapping[str, int]
    anchors: tuple[tuple[str, bytes], ...]
    chain: tuple[PageKey, ...]
    maker: int
    tick: int
    confirmed: bool = True

    @property
    def length(self) -> int:
        """Tokens that a sequence skips when it begins from this checkpoint."""
        return self.key.length


class Checkpoints:
    """All checkpoints of an index, least recently used first.

    Args:
        page_size: tokens per page in the checkpoints' keys.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._known: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._after: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._by_anchor: dict[tuple[str, bytes], dict[bytes, Checkpoint]] = {}
        self._evicted: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Iterates over a copy, least recently used first, so the caller may add and remove checkpoints."""
        return iter(list(self._known.values()))

    def find(self, key: CheckpointKey) -> Checkpoint | None:
        """Returns the checkpoint with this key, whose tokens are compared too; `None` if there is none."""
        known = self._known.get(key.digest)
        return known if known is not None and known.key == key else None

    def named(self, digest: bytes) -> Checkpoint | None:
        """Returns the checkpoint with this digest; `None` if there is none."""
        return self._known.get(digest)

    def along(self, keys: PageKeys, tokens: Sequence[int]) -> list[Checkpoint]:
        """Returns the confirmed checkpoints of all prefixes of `tokens`, longest first."""
        found, size = [], self.page_size
        for full in range(len(tokens) // size + 1):
            after = self._after.get(keys.parent(tokens, size, full))
            if after:
                rest = encode_tokens(tokens[full * size : (full + 1) * size])
                # A copy, as `explain` may read while another thread adds one.
                found += [
                    one
                    for one in list(after.values())
                    if one.confirmed and rest.startswith(one.key.tail)
                ]
        return sorted(found, key=lambda one: -one.length)

    def when_evicted(self, key: CheckpointKey) -> int | None:
        """Returns the tick of a checkpoint's last eviction; `None` if it is not among the recorded evictions."""
        return self._evicted.get(key.digest)

    def add(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint.

        Raises:
            ValueError: its key has a checkpoint already.
        """
        key = checkpoint.key
        if key.digest in self._known:
            raise ValueError(
                f"there is a checkpoint after these {key.length} tokens already; remove it first"
            )
        self._known[key.digest] = checkpoint
        self._after.setdefault(key.parent, {})[key.digest] = checkpoint
        for anchor in checkpoint.anchors:
            self._by_anchor.setdefault(anchor, {})[key.digest] = checkpoint

    def touch(self, checkpoint: Checkpoint, tick: int) -> None:
        """Records a use at `tick`."""
        checkpoint.tick = tick
        self._known.move_to_end(checkpoint.key.digest)

    def resting_on(self, group: str, page: bytes) -> list[Checkpoint]:
        """Returns the checkpoints that need the page with this digest."""
        return list(self._by_anchor.get((group, page), {}).values())

    def remove(self, checkpoint: Checkpoint, tick: int) -> None:
        """Removes a checkpoint and records the tick for `when_evicted`."""
        digest = checkpoint.key.digest
        del self._known[digest]
        _discard(self._after, checkpoint.key.parent, digest)
        for anchor in checkpoint.anchors:
            _discard(self._by_anchor, anchor, digest)
        self._evicted[digest] = tick
        self._evicted.move_to_end(digest)
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def clear(self) -> list[Checkpoint]:
        """Removes all checkpoints and recorded evictions; returns the checkpoints."""
        all_known = list(self._known.values())
        for store in (self._known, self._after, self._by_anchor, self._evicted):
            store.clear()
        return all_known

    def check(self) -> None:
        """Raises `ValueError` if keys, ticks or lookup tables contradict each other."""
        wrong = [
            one.length
            for digest, one in self._known.items()
            if one.key.digest != digest
            or hash_parts("checkpoint", one.key.parent, one.key.tail) != digest
            or self._after.get(one.key.parent, {}).get(digest) is not one
            or any(self._by_anchor.get(anchor, {}).get(digest) is not one for anchor in one.anchors)
        ]
        ticks = [one.tick for one in self._known.values()]
        stray = [
            digest
            for store in (self._after, self._by_anchor)
            for named in store.values()
            for digest in named
            if digest not in self._known
        ]
        if wrong or stray or ticks != sorted(ticks) or {} in (*self._after.values(),):
            raise ValueError(
                f"the {len(self)} checkpoints are corrupt: wrong entries after {wrong} tokens, "
                f"{len(stray)} table entries of removed checkpoints, ticks {ticks}"
            )


def _discard[K](store: dict[K, dict[bytes, Checkpoint]], place: K, digest: bytes) -> None:
    del store[place][digest]
    if not store[place]:
        del store[place]
