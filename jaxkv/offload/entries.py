"""Records of the host tier: Entry, Move, HostStats."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint

EntryKey = tuple[str, bytes]
"""The key of an entry: (group name of a page, or "" for a checkpoint; digest)."""


@dataclass(frozen=True)
class Move:
    """The transfer of one page or state between the device and the host.

    Attributes:
        group: its group name.
        unit: its page or state id on the device.
        handle: its number on the host.
    """

    group: str
    unit: int
    handle: int


@dataclass(eq=False, slots=True)
class Entry:
    """A full page of one group, or a checkpoint with its states and its own pages, on the host.

    Attributes:
        key: its key.
        kept: the page, whose `page` is a handle, or the checkpoint, whose states and tails are handles.
        parts: group name -> handle.
        num_bytes: bytes of all parts, over all layers.
        needs: keys of the entries that a hit on it also needs, on either tier.
        pins: number of swap-ins that use it.
    """

    key: EntryKey
    kept: Node | Checkpoint
    parts: Mapping[str, int]
    num_bytes: int
    needs: tuple[EntryKey, ...]
    pins: int = 0


@dataclass
class HostStats:
    """Statistics of a host tier since it was made.

    Attributes:
        limit_bytes, used_bytes: memory that it may use, and memory that it uses.
        entries: pages and checkpoints that it holds.
        written, read: pages and states copied to the host, and back to the device.
        written_bytes, read_bytes: their bytes.
        evictions: entries evicted to make room.
        refused: entries for which there was no room.
        hits: sequences that began with tokens from the host.
        tokens_read: tokens that these sequences did not compute.
        wasted: pages and states copied back after another sequence had computed the same tokens.
        failures: failed transfers; their entries are lost and their tokens are computed again when needed.
    """

    limit_bytes: int = 0
    used_bytes: int = 0
    entries: int = 0
    written: int = 0
    read: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evictions: int = 0
    refused: int = 0
    hits: int = 0
    tokens_read: int = 0
    wasted: int = 0
    failures: int = 0
