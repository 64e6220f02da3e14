"""The accounting of the host tier: its entries by key, their handles and bytes, and their eviction order.

An entry is a full page of one group, or a checkpoint with all its states and tails. A handle is the number of one page
or state on the host. The arrays themselves and their copies belong to `HostTransfers` (`jaxkv.offload.transfers`).
Tiers under one prefix tree are modelled on SGLang's hierarchical cache and FastDeploy #7787.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint, CheckpointKey, Checkpoints
from jaxkv.cache.spec import CacheLayout, PagedSpec
from jaxkv.offload.entries import Entry, EntryKey, HostStats, Move


class HostTier:
    """Entries on the host. The least recently used entry that no other entry needs is evicted first.

    If all entries that no other entry needs are pinned, the least recently used unpinned entry is evicted.

    An offered entry counts as stored at once. The caller must copy the pages and states in `departures` to the host
    before any other program runs on the device, and may drop the arrays of the handles in `freed`.

    Args:
        layout: the groups, the same as on the device.
        num_bytes: most bytes of all entries.
        page_size: tokens per page in the checkpoints' keys.

    Attributes:
        num_bytes: as given.
        limit: current limit in bytes, lower than `num_bytes` after the host ran out of memory.
        used: bytes of all entries.
        counts: statistics.

    Raises:
        ValueError: `num_bytes` is below 1.
    """

    def __init__(self, layout: CacheLayout, num_bytes: int, *, page_size: int) -> None:
        if num_bytes < 1:
            raise ValueError(
                f"a host tier needs at least 1 byte, got {num_bytes}; set host_bytes=0 for no host tier"
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
        self._entries: OrderedDict[EntryKey, Entry] = OrderedDict()
        self._owners: dict[int, Entry] = {}
        self._dependents: dict[EntryKey, dict[EntryKey, Entry]] = {}
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
        """The current statistics."""
        return replace(
            self.counts, limit_bytes=self.limit, used_bytes=self.used, entries=len(self._entries)
        )

    def bytes_of(self, group: str) -> int:
        """Returns the bytes of one page or state of a group, over all layers."""
        return self._bytes[group]

    def find(self, group: str, key: PageKey) -> Node | None:
        """Returns the page with this key, whose tokens are compared too; its `page` is a handle."""
        entry = self._entries.get((group, key.digest))
        if entry is None or not isinstance(entry.kept, Node) or entry.kept.key != key:
            return None
        return entry.kept

    def entry(self, key: EntryKey) -> Entry | None:
        """Returns the entry with this key; `None` if there is none."""
        return self._entries.get(key)

    def has(self, entry: Entry) -> bool:
        """Whether an entry is still stored."""
        return self._entries.get(entry.key) is entry

    def along(self, keys: PageKeys, tokens: Sequence[int]) -> list[Checkpoint]:
        """Returns the checkpoints of all prefixes of `tokens`, longest first."""
        return self._checkpoints.along(keys, tokens) if len(self._checkpoints) else []

    def find_checkpoint(self, key: CheckpointKey) -> Entry | None:
        """Returns the entry of the checkpoint with this key, whose tokens are compared too; `None` if there is none."""
        return None if self._checkpoints.find(key) is None else self._entries["", key.digest]

    # Entries from the device.

    def offer_page(self, group: str, node: Node) -> bool:
        """Stores a page that is being evicted from the device, unless it is on the host already.

        Returns:
            Whether it is on the host now; False if there was no room.
        """
        key = group, node.key.digest
        if self._known(key):
            return True
        handle = next(self._handles)
        kept = Node(node.key, handle, node.index, 0)
        chained = group in self._chained and node.index > 0
        needs = ((group, node.key.parent),) if chained else ()
        return self._insert(
            Entry(key, kept, {group: handle}, self._bytes[group], needs), {group: node.page}
        )

    def offer_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Stores all states and tails of a checkpoint, like `offer_page`; an unconfirmed checkpoint is refused."""
        key = "", checkpoint.key.digest
        if not checkpoint.confirmed:
            return False
        if self._known(key):
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
        return self._insert(Entry(key, kept, parts, size, checkpoint.anchors), units)

    def departures(self) -> list[Move]:
        """Returns the pages and states to copy from the device, and forgets them; see the class."""
        moves = list(self._leaving.values())
        self._leaving.clear()
        return moves

    def freed(self) -> list[int]:
        """Returns the handles that are no longer used, and forgets them."""
        freed, self._freed = self._freed, []
        return freed

    # Removal of entries.

    def discard(self, handles: Iterable[int]) -> None:
        """Drops the entries of these handles, whose bytes are invalid; unknown handles are ignored.

        Unlike `remove`, it keeps the entries that need them: the device may hold what they lack.
        """
        for handle in handles:
            if (entry := self._owners.get(handle)) is not None:
                self._drop(entry)

    def remove(self, keys: Iterable[EntryKey]) -> None:
        """Drops the entries with these keys and all entries that need them, pinned or not."""
        todo, seen = list(keys), set()
        while todo:
            key = todo.pop()
            if key in seen:
                continue
            seen.add(key)
            todo += self._dependents.get(key, ())
            if (entry := self._entries.get(key)) is not None:
                self._drop(entry)

    def remove_unreachable(self, on_device: Callable[[EntryKey], bool]) -> None:
        """Drops the entries that need one that neither tier has, and all entries that need these.

        Args:
            on_device: whether the device has the page or checkpoint with a key.
        """
        self.remove(
            [
                key
                for key, entry in self._entries.items()
                if not all(needed in self._entries or on_device(needed) for needed in entry.needs)
            ]
        )

    def remove_made(self, seq: int) -> None:
        """Drops the checkpoints that a sequence has made."""
        self.remove(
            [
                key
                for key, entry in self._entries.items()
                if isinstance(entry.kept, Checkpoint) and entry.kept.maker == seq
            ]
        )

    def stop_growing(self) -> bool:
        """Lowers the limit to the bytes in use; returns False and changes nothing if no bytes are in use."""
        self.limit = self.used or self.limit
        return self.used > 0

    def lose_device(self) -> None:
        """Drops entries that have not been read from the device yet, because its cache is lost."""
        self.discard(list(self._leaving))

    def clear(self) -> None:
        """Drops all entries."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    # Use of entries.

    def pin(self, entries: Iterable[Entry]) -> None:
        """Protects entries from eviction until `unpin`."""
        for entry in entries:
            self._pinned += 0 if entry.pins else entry.num_bytes
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Removes the protection of `pin`."""
        for entry in entries:
            entry.pins -= 1
            if not entry.pins and self.has(entry):
                self._pinned -= entry.num_bytes

    def touch(self, entries: Iterable[Entry]) -> None:
        """Records a use of entries, which are given in the order of their prefix."""
        # In reverse, so that the last entry of the prefix is evicted first.
        for entry in reversed(list(entries)):
            self._known(entry.key)

    def check(self) -> None:
        """Raises `ValueError` if bytes, handles or dependencies contradict the entries."""
        used = sum(entry.num_bytes for entry in self._entries.values())
        pinned = sum(entry.num_bytes for entry in self._entries.values() if entry.pins)
        owners = {
            handle: entry for entry in self._entries.values() for handle in entry.parts.values()
        }
        dependents = {
            (needed, key) for key, entry in self._entries.items() for needed in entry.needs
        }
        recorded = {(needed, key) for needed, found in self._dependents.items() for key in found}
        wrong = [
            entry.key
            for entry in self._entries.values()
            if entry.pins < 0
            or entry.num_bytes != sum(self._bytes[name] for name in entry.parts)
            or (isinstance(entry.kept, Checkpoint) != (entry.key[0] == ""))
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
            or dependents != recorded
            or checkpoints != len(self._checkpoints)
        ):
            raise ValueError(
                f"the host tier is corrupt: entries have {used} bytes, counted as {self.used}, limit {self.limit}; "
                f"wrong entries {wrong}, departures without entry {sorted(stray)}, {checkpoints} checkpoints, "
                f"counted as {len(self._checkpoints)}"
            )

    def _known(self, key: EntryKey) -> bool:
        """Records a use of the entry with this key; returns whether there is one."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._entries.move_to_end(key)
        if isinstance(entry.kept, Checkpoint):
            self._tick += 1
            self._checkpoints.touch(entry.kept, self._tick)
        return True

    def _insert(self, entry: Entry, units: Mapping[str, int]) -> bool:
        """Stores an entry whose page and state ids on the device are `units`; returns False if there is no room."""
        if not self._make_room(entry.num_bytes):
            self.counts.refused += 1
            return False
        self._entries[entry.key] = entry
        self.used += entry.num_bytes
        for needed in entry.needs:
            self._dependents.setdefault(needed, {})[entry.key] = entry
        for group, handle in entry.parts.items():
            self._owners[handle] = entry
            self._leaving[handle] = Move(group, units[group], handle)
        if isinstance(entry.kept, Checkpoint):
            self._checkpoints.add(entry.kept)
        return True

    def _drop(self, entry: Entry) -> None:
        """Removes one entry. A handle that `departures` has not returned yet is withdrawn, and is not in `freed`."""
        del self._entries[entry.key]
        self.used -= entry.num_bytes
        self._pinned -= entry.num_bytes if entry.pins else 0
        for needed in entry.needs:
            del self._dependents[needed][entry.key]
            if not self._dependents[needed]:
                del self._dependents[needed]
        for handle in entry.parts.values():
            del self._owners[handle]
            if self._leaving.pop(handle, None) is None:
                self._freed.append(handle)
        if isinstance(entry.kept, Checkpoint):
            self._checkpoints.remove(entry.kept, self._tick)

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts entries until `num_bytes` are free; returns False and evicts none if that is impossible."""
        if self._pinned + num_bytes > self.limit:
            return False
        while self.used + num_bytes > self.limit:
            self._drop(self._victim())
            self.counts.evictions += 1
        return True

    def _victim(self) -> Entry:
        """Returns the entry to evict, see the class."""
        oldest: Entry | None = None
        for entry in self._entries.values():
            if entry.pins:
                continue
            oldest = oldest or entry
            if entry.key not in self._dependents:
                return entry
        assert oldest is not None, "pinned entries leave room for one more"
        return oldest
