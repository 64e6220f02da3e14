"""What of the prefix index lies on the host: names, handles and bytes, and who goes first. Knows no array, no device.

An entry is what is of use as one: a full page of one group, or a checkpoint with all its states and pages of its own.
The idea of tiers under one tree of prefixes: SGLang's hierarchical cache and FastDeploy #7787.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint, CheckpointKey, Checkpoints
from jaxkv.cache.spec import CacheLayout, PagedSpec
from jaxkv.offload.entries import Entry, HostStats, Move, Place


class HostTier:
    """The books of the host's side: the longest unused goes first, but after what rests on it.

    What is offered counts as there at once. Whoever moves bytes must do `departures` before anything else runs on the
    device, and may drop what `freed` names.

    Args:
        layout: the groups, the same as on the device.
        num_bytes: most bytes of all entries.
        page_size: of the pages by which checkpoints are named.

    Attributes:
        num_bytes: as given.
        limit: most bytes now; less, if there turned out to be less memory.
        used: bytes of all entries.

    Raises:
        ValueError: there is no room for a single byte.
    """

    def __init__(self, layout: CacheLayout, num_bytes: int, *, page_size: int) -> None:
        if num_bytes < 1:
            raise ValueError(
                f"a tier on the host needs at least 1 byte, got {num_bytes}; 0 in the configuration means none"
            )
        self.num_bytes = num_bytes
        self.limit = num_bytes
        self.used = 0
        self.counts = HostStats()
        self._bytes = {group.name: group.bytes_per_unit for group in layout.groups}
        self._chained = {
            group.name
            for group in layout.paged_groups
            if isinstance(group.spec, PagedSpec) and group.spec.window is None
        }
        self._entries: OrderedDict[Place, Entry] = OrderedDict()
        self._owners: dict[int, Entry] = {}
        self._resting: dict[Place, dict[Place, Entry]] = {}
        self._checkpoints = Checkpoints(page_size)
        self._leaving: dict[int, Move] = {}
        self._freed: list[int] = []
        self._handles = count()
        self._pinned = 0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def stats(self) -> HostStats:
        """Counts of this moment."""
        return replace(
            self.counts, limit_bytes=self.limit, used_bytes=self.used, entries=len(self._entries)
        )

    def bytes_of(self, group: str) -> int:
        """Returns the bytes of one page or state of a group, over all layers."""
        return self._bytes[group]

    def find(self, group: str, key: PageKey) -> Node | None:
        """Returns the page of this name that holds these very tokens; its `page` is a handle."""
        entry = self._entries.get((group, key.digest))
        if entry is None or not isinstance(entry.kept, Node) or entry.kept.key != key:
            return None
        return entry.kept

    def entry(self, place: Place) -> Entry | None:
        """Returns what lies at a place."""
        return self._entries.get(place)

    def has(self, entry: Entry) -> bool:
        """Whether an entry is there still."""
        return self._entries.get(entry.place) is entry

    def along(self, keys: PageKeys, tokens: Sequence[int]) -> list[Checkpoint]:
        """Returns the checkpoints that some beginning of a text ends at, the longest first."""
        return self._checkpoints.along(keys, tokens) if len(self._checkpoints) else []

    def find_checkpoint(self, key: CheckpointKey) -> Entry | None:
        """Returns the checkpoint of this very text."""
        return None if self._checkpoints.find(key) is None else self._entries["", key.digest]

    # What comes from the device.

    def offer_page(self, group: str, node: Node) -> bool:
        """Takes a page that the device is about to give up; returns whether it is on the host now, or was before."""
        place = group, node.key.digest
        if self._known(place):
            return True
        handle = next(self._handles)
        kept = Node(node.key, handle, node.index, 0)
        chained = group in self._chained and node.index > 0
        rests = ((group, node.key.parent),) if chained else ()
        return self._insert(
            Entry(place, kept, {group: handle}, self._bytes[group], rests), {group: node.page}
        )

    def offer_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Takes all states and pages of a checkpoint, as `offer_page` does; one that is not sure yet is refused."""
        place = "", checkpoint.key.digest
        if not checkpoint.confirmed:
            return False
        if self._known(place):
            return True
        units = {**checkpoint.states, **checkpoint.tails}
        parts = {name: next(self._handles) for name in units}
        self._tick += 1
        kept = replace(
            checkpoint,
            states={name: parts[name] for name in checkpoint.states},
            tails={name: parts[name] for name in checkpoint.tails},
            tick=self._tick,
        )
        size = sum(self._bytes[name] for name in units)
        return self._insert(Entry(place, kept, parts, size, checkpoint.anchors), units)

    def departures(self) -> list[Move]:
        """Hands out what must be read from the device before anything else runs there, once."""
        moves = list(self._leaving.values())
        self._leaving.clear()
        return moves

    def freed(self) -> list[int]:
        """Hands out handles that nobody will ask for again, once."""
        freed, self._freed = self._freed, []
        return freed

    # What goes.

    def discard(self, handles: Iterable[int]) -> None:
        """Forgets the entries of these handles, whose bytes are not to be trusted; those that are gone are ignored."""
        for handle in handles:
            if (entry := self._owners.get(handle)) is not None:
                self._drop(entry)

    def forget(self, places: Iterable[Place]) -> None:
        """Forgets what lies at these places, and whatever rests on them, pinned or not."""
        todo, seen = list(places), set()
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            todo += self._resting.get(place, ())
            if (entry := self._entries.get(place)) is not None:
                self._drop(entry)

    def forget_made(self, seq: int) -> None:
        """Forgets the checkpoints that a sequence has made."""
        self.forget(
            [
                place
                for place, entry in self._entries.items()
                if isinstance(entry.kept, Checkpoint) and entry.kept.maker == seq
            ]
        )

    def stop_growing(self) -> bool:
        """Makes the bytes that are used the most there may be; returns False if there are none."""
        self.limit = self.used or self.limit
        return self.used > 0

    def lose_device(self) -> None:
        """Forgets what has not left the device yet, whose cache is lost."""
        self.discard(list(self._leaving))

    def clear(self) -> None:
        """Forgets everything."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    # What is used.

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keeps entries from being given up for room, until `unpin`."""
        for entry in entries:
            self._pinned += 0 if entry.pins else entry.num_bytes
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Undoes `pin`."""
        for entry in entries:
            entry.pins -= 1
            if not entry.pins and self.has(entry):
                self._pinned -= entry.num_bytes

    def touch(self, entries: Iterable[Entry]) -> None:
        """Says that entries were used, the first of a text before those that follow it."""
        # The last of them shall be the first to go.
        for entry in reversed(list(entries)):
            self._known(entry.place)

    def check(self) -> None:
        """Raises `ValueError` if bytes, handles or rests contradict the entries."""
        used = sum(entry.num_bytes for entry in self._entries.values())
        pinned = sum(entry.num_bytes for entry in self._entries.values() if entry.pins)
        owners = {
            handle: entry for entry in self._entries.values() for handle in entry.parts.values()
        }
        resting = {(rest, place) for place, entry in self._entries.items() for rest in entry.rests}
        noted = {(rest, place) for rest, held in self._resting.items() for place in held}
        wrong = [
            entry.place
            for entry in self._entries.values()
            if entry.pins < 0
            or entry.num_bytes != sum(self._bytes[name] for name in entry.parts)
            or (isinstance(entry.kept, Checkpoint) != (entry.place[0] == ""))
        ]
        checkpoints = sum(isinstance(entry.kept, Checkpoint) for entry in self._entries.values())
        self._checkpoints.check()
        stray = set(self._leaving) - set(owners)
        if (
            wrong
            or stray
            or used != self.used
            or used > self.limit
            or pinned != self._pinned
            or owners != self._owners
            or resting != noted
            or checkpoints != len(self._checkpoints)
        ):
            raise ValueError(
                f"the host's books are corrupt: {used} bytes are held, counted as {self.used}, limit {self.limit}; "
                f"wrong entries {wrong}, moves of nobody {sorted(stray)}, {checkpoints} checkpoints, "
                f"{len(self._checkpoints)} are named"
            )

    def _known(self, place: Place) -> bool:
        """Marks a place as used, if there is something."""
        entry = self._entries.get(place)
        if entry is None:
            return False
        self._entries.move_to_end(place)
        if isinstance(entry.kept, Checkpoint):
            self._tick += 1
            self._checkpoints.touch(entry.kept, self._tick)
        return True

    def _insert(self, entry: Entry, units: Mapping[str, int]) -> bool:
        if not self._make_room(entry.num_bytes):
            self.counts.refused += 1
            return False
        self._entries[entry.place] = entry
        self.used += entry.num_bytes
        for rest in entry.rests:
            self._resting.setdefault(rest, {})[entry.place] = entry
        for group, handle in entry.parts.items():
            self._owners[handle] = entry
            self._leaving[handle] = Move(group, units[group], handle)
        if isinstance(entry.kept, Checkpoint):
            self._checkpoints.add(entry.kept)
        return True

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.place]
        self.used -= entry.num_bytes
        self._pinned -= entry.num_bytes if entry.pins else 0
        for rest in entry.rests:
            del self._resting[rest][entry.place]
            if not self._resting[rest]:
                del self._resting[rest]
        for handle in entry.parts.values():
            del self._owners[handle]
            if self._leaving.pop(handle, None) is None:
                self._freed.append(handle)
        if isinstance(entry.kept, Checkpoint):
            self._checkpoints.remove(entry.kept, self._tick)

    def _make_room(self, num_bytes: int) -> bool:
        """Gives up entries until so many bytes are free; gives up none if that cannot be."""
        if self._pinned + num_bytes > self.limit:
            return False
        while self.used + num_bytes > self.limit:
            self._drop(self._victim())
            self.counts.evictions += 1
        return True

    def _victim(self) -> Entry:
        """Returns the longest unused that nothing rests on; if pins leave none, the longest unused."""
        oldest: Entry | None = None
        for entry in self._entries.values():
            if entry.pins:
                continue
            oldest = oldest or entry
            if entry.place not in self._resting:
                return entry
        assert oldest is not None, "room was counted before it is made"
        return oldest
