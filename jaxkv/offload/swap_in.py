"""Swap-ins: finds a prefix over both tiers, and allocates pages and states for its parts on the host.

A swap-in is a sequence in the page allocator without steps. It holds the pages and states to fill, and those on the
device that belong to the same prefix. When all copies are complete, the prefix index takes them over. Until then, a
release of the sequence frees everything. `transfers.py` copies the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxkv.cache.kept_pages.keeper import PageKeeper
from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.lookup import Lookup, longest
from jaxkv.cache.kept_pages.tree import Node, PrefixTree
from jaxkv.cache.kept_states.checkpoints import Checkpoint
from jaxkv.cache.kept_states.keeper import StateKeeper
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.errors import OutOfPages, OutOfStates
from jaxkv.offload.entries import Entry, Move
from jaxkv.offload.tier import HostTier


@dataclass(eq=False)
class SwapIn:
    """One swap-in.

    Attributes:
        number: number of its sequence in the page allocator.
        length: tokens of the prefix.
        gained: tokens of the prefix that are not on the device.
        moves: the copies from the host.
        pages: (group name, key, table position, page id) of the full pages to fill, each after its predecessors.
        present: (group name, key) of the prefix's pages that were on the device.
        entries: the entries on the host, in the order of the prefix.
        checkpoint: the checkpoint to swap in, with the device ids of its parts; `None` if there is none to swap in.
        device_checkpoint: the prefix's checkpoint if it is on the device; `None` if it is swapped in or there is none.
    """

    number: int
    length: int
    gained: int
    moves: list[Move] = field(default_factory=list)
    pages: list[tuple[str, PageKey, int, int]] = field(default_factory=list)
    present: list[tuple[str, PageKey]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    device_checkpoint: Checkpoint | None = None


def attach_host(index: PrefixIndex, num_bytes: int) -> "SwapIns":
    """Attaches a host tier of at most `num_bytes` to a prefix index; returns its swap-ins.

    Raises:
        ValueError: `num_bytes` is below 1, or the index has a lower tier already.
    """
    tier = HostTier(index.layout, num_bytes, page_size=index.kept_states.kept.page_size)
    swap_ins = SwapIns(index.advance, index.allocator, index.kept_pages, index.kept_states, tier)
    index.attach_lower_tier(tier, swap_ins)
    return swap_ins


class SwapIns:
    """Starts, finishes and releases the swap-ins of one prefix index.

    Args:
        advance: increments the index's tick and returns it.
        allocator: pages and states of the device.
        pages: the index's cached pages.
        states: the index's checkpoints.
        tier: the host tier.
    """

    def __init__(
        self,
        advance: Callable[[], int],
        allocator: PageAllocator,
        pages: PageKeeper,
        states: StateKeeper,
        tier: HostTier,
    ) -> None:
        self.tier = tier
        self._advance = advance
        self._allocator = allocator
        self._pages = pages
        self._states = states
        self._next = -1
        self._open: dict[int, SwapIn] = {}

    def find_prefix(
        self, tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> tuple[int, Checkpoint | None]:
        """Returns the longest prefix, up to `limit` tokens, that both tiers hold together, and its checkpoint."""
        lookups = self._look_up(tokens, keys)
        if not self._states.groups:
            return (longest(lookups, limit) if lookups else 0), None
        found = (
            (*self._states.kept.along(keys, tokens), *self.tier.along(keys, tokens))
            if self._states.capacity
            else ()
        )
        # The sort is stable: for equal lengths, the device's checkpoint comes first.
        for one in sorted(found, key=lambda one: -one.length):
            if one.length <= limit and all(
                lookup.accepts(one.length, tail=one.tails.get(lookup.name)) for lookup in lookups
            ):
                return one.length, one
        return 0, None

    def start(
        self, tokens: Sequence[int], keys: PageKeys, limit: int, reused: int, goal: int
    ) -> SwapIn | None:
        """Starts the swap-in of a prefix, and allocates its pages and states on the device.

        Args:
            tokens: tokens of the request.
            keys: their page keys.
            limit: most tokens of the prefix.
            reused: tokens of the prefix on the device alone.
            goal: tokens of the whole sequence; nothing is started if it would not have enough pages.

        Returns:
            The swap-in. `None`, and nothing has changed, if the host's prefix is not longer or there is no room.
        """
        if not len(self.tier):
            return None
        length, checkpoint = self.find_prefix(tokens, keys, limit)
        if length <= reused:
            return None
        if checkpoint is not None and not self._states.could_have_room(checkpoint.key):
            return None
        made = SwapIn(self._next, length, length - reused)
        self._next -= 1
        self._allocator.open(made.number)
        self._open[made.number] = made
        try:
            if self._fill(made, self._look_up(tokens, keys), checkpoint, goal):
                return made
        except BaseException:
            self.release(made)
            raise
        self.release(made)
        return None

    def land(self, made: SwapIn) -> list[Move] | None:
        """Finishes a swap-in whose copies are complete: passes its pages and states to the prefix index.

        Returns:
            The wasted moves, whose tokens another sequence has computed meanwhile. `None`, and the index is unchanged,
            if another part of the prefix has been evicted meanwhile.
        """
        one = made.checkpoint
        is_open = made.number in self._open and self._allocator.is_open(made.number)
        if not (is_open and self._is_valid(made)):
            self.release(made)
            return None
        tick, wasted = self._advance(), set()
        for name, key, position, page in made.pages:
            if self._pages.trees[name].add(key, page, position, tick):
                self._allocator.pool(name).keep(page)
            else:
                wasted.add((name, page))
        if one is not None:
            if self._states.kept.find(one.key) is None:
                self._states.restore(one, tick)
            else:
                wasted |= {*one.states.items(), *one.tails.items()}
        counts = self.tier.counts
        counts.hits += 1
        counts.tokens_read += made.gained
        counts.wasted += len(wasted)
        self.tier.touch(made.entries)
        self.release(made)
        return [move for move in made.moves if (move.group, move.unit) in wasted]

    def release(self, made: SwapIn) -> None:
        """Releases a swap-in's pages, states and pins; a second call does nothing."""
        if self._open.pop(made.number, None) is None:
            return
        self.tier.unpin(made.entries)
        if self._allocator.is_open(made.number):
            self._allocator.release(made.number)

    def release_all(self) -> None:
        """Cancels every unfinished swap-in."""
        for made in list(self._open.values()):
            self.release(made)

    def _fill(
        self, made: SwapIn, lookups: Sequence[Lookup], checkpoint: Checkpoint | None, goal: int
    ) -> bool:
        """Shares the parts on the device and takes pages and states for the others; returns whether it has them all."""
        if checkpoint is not None:
            self._hold_checkpoint(made, checkpoint)
        wanted = {one.name: self._hold_pages(made, one, checkpoint) for one in lookups}
        return self._fits(made, goal) and self._take_units(made, wanted)

    def _use(self, made: SwapIn, entry: Entry) -> None:
        made.entries.append(entry)
        self.tier.pin([entry])

    def _look_up(self, tokens: Sequence[int], keys: PageKeys) -> list[Lookup]:
        """Returns, for each group, the cached pages of these tokens on both tiers."""
        return [
            Lookup(
                name,
                rule,
                _Tiers(self._pages.trees[name], self.tier, name),
                keys.pages(tokens, rule.page_size, len(tokens)),
            )
            for name, rule in self._pages.rules.items()
        ]

    def _hold_checkpoint(self, made: SwapIn, one: Checkpoint) -> None:
        """Records a checkpoint on the host, or shares the states and pages of one on the device."""
        entry = self.tier.find_checkpoint(one.key)
        if entry is not None and entry.kept is one:
            made.checkpoint = one
            self._use(made, entry)
            return
        made.device_checkpoint = one
        for name, unit in (*one.states.items(), *one.tails.items()):
            self._allocator.hold(made.number, name, [unit])

    def _hold_pages(
        self, made: SwapIn, lookup: Lookup, checkpoint: Checkpoint | None
    ) -> list[Node]:
        """Shares the needed pages of one group that are on the device; returns those on the host."""
        name, missing = lookup.name, []
        tree = self._pages.trees[name]
        inside = checkpoint is not None and name in checkpoint.tails
        for index in lookup.rule.needs(made.length):
            node = lookup.nodes[index] if index < len(lookup.nodes) else None
            if node is None or (inside and index >= made.length // lookup.rule.page_size):
                continue
            if tree.find(node.key) is node:
                self._allocator.hold(made.number, name, [node.page])
                made.present.append((name, node.key))
            else:
                missing.append(node)
                entry = self.tier.entry((name, node.key.digest))
                assert entry is not None, "a lookup finds only pages of the two tiers"
                self._use(made, entry)
        return missing

    def _fits(self, made: SwapIn, goal: int) -> bool:
        """Whether free and reclaimable pages suffice for the whole sequence; otherwise the swap-in would be useless."""
        held = self._allocator.held(made.number)
        for name, rule in self._pages.rules.items():
            pool = self._allocator.pool(name)
            needed = -(-goal // rule.page_size) - len(held.pages[name])
            if rule.window is None and needed > pool.num_free + pool.num_idle:
                return False
        return True

    def _take_units(self, made: SwapIn, wanted: Mapping[str, Sequence[Node]]) -> bool:
        """Takes a page or state for each part on the host; returns False and takes nothing if there are too few."""
        one = made.checkpoint
        counts = {name: len(nodes) for name, nodes in wanted.items()}
        for name in () if one is None else (*one.states, *one.tails):
            counts[name] = counts.get(name, 0) + 1
        try:
            taken = self._allocator.place(made.number, counts)
        except (OutOfPages, OutOfStates):
            return False
        for name, nodes in wanted.items():
            for node, page in zip(nodes, taken[name], strict=False):
                made.pages.append((name, node.key, node.index, page))
                made.moves.append(Move(name, page, node.page))
        if one is not None:
            # The checkpoint's own page of a group was counted after the full ones, so it is the last one taken.
            units = {name: taken[name][-1] for name in (*one.states, *one.tails)}
            for name, handle in (*one.states.items(), *one.tails.items()):
                made.moves.append(Move(name, units[name], handle))
            states = {name: units[name] for name in one.states}
            tails = {name: units[name] for name in one.tails}
            made.checkpoint = replace(one, states=states, tails=tails, tick=0)
        return True

    def _is_valid(self, made: SwapIn) -> bool:
        """Whether all parts of the prefix are still on their tiers, and there is room for its checkpoint."""
        trees = self._pages.trees
        coming = {(name, key.digest) for name, key, _, _ in made.pages}
        one, on_device = made.checkpoint, made.device_checkpoint
        anchors = () if one is None else one.anchors
        return (
            all(self.tier.has(entry) for entry in made.entries)
            and all(trees[name].find(key) is not None for name, key in made.present)
            and all(anchor in coming or trees[anchor[0]].named(anchor[1]) for anchor in anchors)
            and (on_device is None or self._states.kept.find(on_device.key) is on_device)
            and (one is None or self._states.has_room(one.key))
        )


class _Tiers:
    """Finds one group's pages on either tier, the device's first."""

    def __init__(self, tree: PrefixTree, tier: HostTier, name: str) -> None:
        self._tree = tree
        self._tier = tier
        self._name = name

    def find(self, key: PageKey) -> Node | None:
        """Returns the page with this key, whose tokens are compared too; `None` if there is none."""
        return self._tree.find(key) or self._tier.find(self._name, key)
