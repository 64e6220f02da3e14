"""What lies on the host as one, what moves, and what is counted, as records. See `host_tier`, which has the books."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint

Place = tuple[str, bytes]
"""Where an entry is found: the group of a page, or "" for a checkpoint, and its name."""


@dataclass(frozen=True)
class Move:
    """One page or state on its way between the tiers.

    Attributes:
        group: whose it is.
        unit: its id on the device.
        handle: its number on the host.
    """

    group: str
    unit: int
    handle: int


@dataclass(eq=False, slots=True)
class Entry:
    """What comes and goes as one.

    Attributes:
        place: its group and name.
        kept: the page, whose `page` is a handle, or the checkpoint, whose states and tails are handles.
        parts: group's name -> handle.
        num_bytes: of all parts, over all layers.
        rests: places without which it is of no use, on whichever tier they are.
        pins: swap-ins that need it.
    """

    place: Place
    kept: Node | Checkpoint
    parts: Mapping[str, int]
    num_bytes: int
    rests: tuple[Place, ...]
    pins: int = 0


@dataclass
class HostStats:
    """What lies on the host, and what has moved since it was made.

    Attributes:
        limit_bytes, used_bytes: memory that it may take, and takes.
        entries: pages and checkpoints.
        written, read: pages and states that went there, and came back.
        written_bytes, read_bytes: their bytes.
        evictions: pages and checkpoints forgotten to make room.
        refused: those that found no room.
        hits: sequences that began with something that came back.
        tokens_read: tokens that they need not compute for it.
        wasted: pages and states that came back when another sequence had computed the same meanwhile.
        failures: transfers that failed; what they held is forgotten, and computed again by whoever needs it.
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
