"""Checkpoints: states of recurrent layers that outlive their sequences, found again by the tokens they come after.

A checkpoint belongs to one length of one text, whatever the pages' sizes. It is named by the last full page before it
and the tokens after that. This file knows names, ids and ticks; the page allocator records who holds what.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.cache.kept_pages.keys import PageKeys, encode_tokens, hash_parts

_REMEMBERED = 4096
"""Evictions that can be explained afterwards."""


class CheckpointKey(NamedTuple):
    """The name of a text of some length.

    Attributes:
        parent: name of the last full page; of the root, where there is none.
        tail: the tokens after that page as little-endian int32, compared on every hit.
        digest: its own name, 256 bits.
        length: tokens of the text.
    """

    parent: bytes
    tail: bytes
    digest: bytes
    length: int


def checkpoint_key(
    keys: PageKeys, tokens: Sequence[int], length: int, page_size: int
) -> CheckpointKey:
    """Returns the name of the first `length` tokens of a text, whose pages of `page_size` tokens are named already."""
    full = length // page_size
    parent = keys.parent(tokens, page_size, full)
    tail = encode_tokens(tokens[full * page_size : length])
    return CheckpointKey(parent, tail, hash_parts("checkpoint", parent, tail), length)


@dataclass(eq=False, slots=True)
class Checkpoint:
    """What the index keeps so that a sequence can begin after a text.

    Attributes:
        key: its name.
        states: recurrent group's name -> the state after the text.
        tails: paged group's name -> a page of its own with the text's last tokens, where the text ends inside a page.
        anchors: (paged group, page's name) of the kept pages without which it is of no use.
        maker: the sequence that computed it.
        tick: when it was last used.
        sure: the step that wrote it was read and found good; before, nobody begins from it.
    """

    key: CheckpointKey
    states: Mapping[str, int]
    tails: Mapping[str, int]
    anchors: tuple[tuple[str, bytes], ...]
    maker: int
    tick: int
    sure: bool = True

    @property
    def length(self) -> int:
        """Tokens that a sequence skips that begins from it."""
        return self.key.length


class Checkpoints:
    """All checkpoints of an index, the longest unused first.

    Args:
        page_size: of the pages by which they are named.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._known: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._after: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._resting: dict[tuple[str, bytes], dict[bytes, Checkpoint]] = {}
        self._evicted: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Checkpoint]:
        """The longest unused first; may be changed meanwhile."""
        return iter(list(self._known.values()))

    def find(self, key: CheckpointKey) -> Checkpoint | None:
        """Returns the checkpoint of this very text, if it is kept."""
        known = self._known.get(key.digest)
        return known if known is not None and known.key == key else None

    def named(self, digest: bytes) -> Checkpoint | None:
        """Returns the checkpoint of this name."""
        return self._known.get(digest)

    def along(self, keys: PageKeys, tokens: Sequence[int]) -> list[Checkpoint]:
        """Returns those that some beginning of a text ends at, the longest first."""
        found, size = [], self.page_size
        for full in range(len(tokens) // size + 1):
            after = self._after.get(keys.parent(tokens, size, full))
            if after:
                rest = encode_tokens(tokens[full * size : (full + 1) * size])
                found += [
                    one for one in after.values() if one.sure and rest.startswith(one.key.tail)
                ]
        return sorted(found, key=lambda one: -one.length)

    def when_evicted(self, key: CheckpointKey) -> int | None:
        """Returns the tick at which a checkpoint was given up last; `None` if it never was, or too long ago."""
        return self._evicted.get(key.digest)

    def add(self, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint.

        Raises:
            ValueError: there is one of this name already.
        """
        key = checkpoint.key
        if key.digest in self._known:
            raise ValueError(f"the checkpoint after {key.length} tokens is kept already")
        self._known[key.digest] = checkpoint
        self._after.setdefault(key.parent, {})[key.digest] = checkpoint
        for anchor in checkpoint.anchors:
            self._resting.setdefault(anchor, {})[key.digest] = checkpoint

    def touch(self, checkpoint: Checkpoint, tick: int) -> None:
        """Says that it was used."""
        checkpoint.tick = tick
        self._known.move_to_end(checkpoint.key.digest)

    def resting_on(self, group: str, page: bytes) -> list[Checkpoint]:
        """Returns those that are of no use without a page of this name."""
        return list(self._resting.get((group, page), {}).values())

    def remove(self, checkpoint: Checkpoint, tick: int) -> None:
        """Forgets one, but remembers when, for `when_evicted`."""
        digest = checkpoint.key.digest
        del self._known[digest]
        _discard(self._after, checkpoint.key.parent, digest)
        for anchor in checkpoint.anchors:
            _discard(self._resting, anchor, digest)
        self._evicted[digest] = tick
        self._evicted.move_to_end(digest)
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def clear(self) -> list[Checkpoint]:
        """Forgets all, and what was evicted; returns them."""
        all_known = list(self._known.values())
        for store in (self._known, self._after, self._resting, self._evicted):
            store.clear()
        return all_known

    def check(self) -> None:
        """Raises `ValueError` if names, uses or places contradict one another."""
        wrong = [
            one.length
            for digest, one in self._known.items()
            if one.key.digest != digest
            or hash_parts("checkpoint", one.key.parent, one.key.tail) != digest
            or self._after.get(one.key.parent, {}).get(digest) is not one
            or any(self._resting.get(place, {}).get(digest) is not one for place in one.anchors)
        ]
        ticks = [one.tick for one in self._known.values()]
        stray = [
            digest
            for store in (self._after, self._resting)
            for named in store.values()
            for digest in named
            if digest not in self._known
        ]
        if wrong or stray or ticks != sorted(ticks) or {} in (*self._after.values(),):
            raise ValueError(
                f"the {len(self)} checkpoints are corrupt: those after {wrong} tokens, "
                f"{len(stray)} that are gone, ticks {ticks}"
            )


def _discard[K](store: dict[K, dict[bytes, Checkpoint]], place: K, digest: bytes) -> None:
    del store[place][digest]
    if not store[place]:
        del store[place]
