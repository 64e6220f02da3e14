"""Bringing a prefix back from the host: which parts of it are where, and places for all of them or for none.

A swap-in is a sequence in the page allocator that computes nothing. It holds the places that are being filled, and the
pages and states on the device that they are of use with. When all bytes are there the index takes its places over;
until then, releasing the sequence leaves nothing behind. This file moves no bytes.
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
    """A prefix on its way back.

    Attributes:
        number: of the sequence in the page allocator that holds the places.
        length: tokens that it lets a sequence skip.
        gained: of these, those that it could not skip without.
        moves: what must come from the host.
        pages: (group, key, position, page) of the full pages among them, each after those before it.
        present: (group, key) of the pages that were on the device.
        entries: what lies on the host, the first of the text first.
        checkpoint: the one that comes back, with the ids on the device that its parts are to have.
        beside: the one on the device that the pages belong to.
    """

    number: int
    length: int
    gained: int
    moves: list[Move] = field(default_factory=list)
    pages: list[tuple[str, PageKey, int, int]] = field(default_factory=list)
    present: list[tuple[str, PageKey]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    beside: Checkpoint | None = None


def attach_host(index: PrefixIndex, num_bytes: int) -> "SwapIns":
    """Lets what an index evicts go to the host, in at most so many bytes; returns what brings it back.

    Raises:
        ValueError: fewer than 1 byte, or the index has a lower tier already.
    """
    tier = HostTier(index.layout, num_bytes, page_size=index.kept_states.kept.page_size)
    swap_ins = SwapIns(index.advance, index.allocator, index.kept_pages, index.kept_states, tier)
    index.attach_lower_tier(tier, swap_ins)
    return swap_ins


class SwapIns:
    """Begins, ends and gives up swap-ins over one index.

    Args:
        advance: moves the clock of uses on and returns it.
        allocator: pages and states of the device.
        pages: the index's kept pages.
        states: its checkpoints.
        tier: the books of the host.
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

    def find(
        self, tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> tuple[int, Checkpoint | None]:
        """Returns the longest beginning up to `limit` tokens that both tiers have together, and its checkpoint."""
        lookups = self._look_up(tokens, keys)
        if not self._states.groups:
            return (longest(lookups, limit) if lookups else 0), None
        found = (
            (*self._states.kept.along(keys, tokens), *self.tier.along(keys, tokens))
            if self._states.capacity
            else ()
        )
        # A stable sort: of equal lengths the device's comes first.
        for one in sorted(found, key=lambda one: -one.length):
            if one.length <= limit and all(
                lookup.accepts(one.length, tail=one.tails.get(lookup.name)) for lookup in lookups
            ):
                return one.length, one
        return 0, None

    def begin(
        self, tokens: Sequence[int], keys: PageKeys, limit: int, reused: int, goal: int
    ) -> SwapIn | None:
        """Takes places for what the host has of a text beyond the device.

        Args:
            tokens: the text.
            keys: its keys.
            limit: most tokens to skip.
            reused: tokens that can be skipped without.
            goal: tokens that the sequence will need pages for; if they could not be had, nothing is begun.

        Returns:
            What to move; `None`, and nothing has changed, if the host does not help or there is no room.
        """
        if not len(self.tier):
            return None
        length, checkpoint = self.find(tokens, keys, limit)
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
            self.drop(made)
            raise
        self.drop(made)
        return None

    def land(self, made: SwapIn) -> list[Move] | None:
        """Gives what has come back to the index; the next `adopt` finds it. Ends the swap-in.

        Returns:
            What came in vain, since the same was computed meanwhile, and whose places are free again; `None`, and the
            index is as it was, if something else that the prefix needs is gone.
        """
        one = made.checkpoint
        held = made.number in self._open and self._allocator.is_open(made.number)
        if not (held and self._still_good(made)):
            self.drop(made)
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
        self.drop(made)
        return [move for move in made.moves if (move.group, move.unit) in wasted]

    def drop(self, made: SwapIn) -> None:
        """Gives a swap-in up, with all its places; twice is once."""
        if self._open.pop(made.number, None) is None:
            return
        self.tier.unpin(made.entries)
        if self._allocator.is_open(made.number):
            self._allocator.release(made.number)

    def drop_all(self) -> None:
        """Gives every swap-in up."""
        for made in list(self._open.values()):
            self.drop(made)

    def _fill(
        self, made: SwapIn, lookups: Sequence[Lookup], checkpoint: Checkpoint | None, goal: int
    ) -> bool:
        """Holds what is there, and takes places for what is to come; returns whether it has them all."""
        if checkpoint is not None:
            self._hold_checkpoint(made, checkpoint)
        wanted = {one.name: self._hold_pages(made, one, checkpoint) for one in lookups}
        return self._fits(made, goal) and self._take_places(made, wanted)

    def _need(self, made: SwapIn, entry: Entry) -> None:
        made.entries.append(entry)
        self.tier.pin([entry])

    def _look_up(self, tokens: Sequence[int], keys: PageKeys) -> list[Lookup]:
        """Returns what both tiers together keep of a text, group by group."""
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
        """Notes a checkpoint of the host, or shares what one of the device has."""
        entry = self.tier.find_checkpoint(one.key)
        if entry is not None and entry.kept is one:
            made.checkpoint = one
            self._need(made, entry)
            return
        made.beside = one
        for name, unit in (*one.states.items(), *one.tails.items()):
            self._allocator.hold(made.number, name, [unit])

    def _hold_pages(
        self, made: SwapIn, lookup: Lookup, checkpoint: Checkpoint | None
    ) -> list[Node]:
        """Shares the pages that one group needs and the device has, and returns those that the host has."""
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
                assert entry is not None, "what a look-up finds is on one of the tiers"
                self._need(made, entry)
        return missing

    def _fits(self, made: SwapIn, goal: int) -> bool:
        """Whether the whole sequence could have its pages, as far as one can tell: else it would come back in vain."""
        held = self._allocator.held(made.number)
        for name, rule in self._pages.rules.items():
            pool = self._allocator.pool(name)
            needed = -(-goal // rule.page_size) - len(held.pages[name])
            if rule.window is None and needed > pool.num_free + pool.num_idle:
                return False
        return True

    def _take_places(self, made: SwapIn, wanted: Mapping[str, Sequence[Node]]) -> bool:
        """Takes a page or state for everything that comes, in all groups or in none."""
        one = made.checkpoint
        counts = {name: len(nodes) for name, nodes in wanted.items()}
        for name in () if one is None else (*one.states, *one.tails):
            counts[name] = counts.get(name, 0) + 1
        try:
            places = self._allocator.place(made.number, counts)
        except (OutOfPages, OutOfStates):
            return False
        for name, nodes in wanted.items():
            for node, page in zip(nodes, places[name], strict=False):
                made.pages.append((name, node.key, node.index, page))
                made.moves.append(Move(name, page, node.page))
        if one is not None:
            # A checkpoint's own page of a group was counted behind the full ones.
            units = {name: places[name][-1] for name in (*one.states, *one.tails)}
            for name, handle in (*one.states.items(), *one.tails.items()):
                made.moves.append(Move(name, units[name], handle))
            states = {name: units[name] for name in one.states}
            tails = {name: units[name] for name in one.tails}
            made.checkpoint = replace(one, states=states, tails=tails, tick=0)
        return True

    def _still_good(self, made: SwapIn) -> bool:
        """Whether what was needed is where it was, or came to the device meanwhile."""
        trees = self._pages.trees
        coming = {(name, key.digest) for name, key, _, _ in made.pages}
        one, beside = made.checkpoint, made.beside
        anchors = () if one is None else one.anchors
        return (
            all(self.tier.has(entry) for entry in made.entries)
            and all(trees[name].find(key) is not None for name, key in made.present)
            and all(place in coming or trees[place[0]].named(place[1]) for place in anchors)
            and (beside is None or self._states.kept.find(beside.key) is beside)
            and (one is None or self._states.has_room(one.key))
        )


class _Tiers:
    """One group's pages on either tier, the device's first."""

    def __init__(self, tree: PrefixTree, tier: HostTier, name: str) -> None:
        self._tree = tree
        self._tier = tier
        self._name = name

    def find(self, key: PageKey) -> Node | None:
        """Returns the page of this name that holds these very tokens."""
        return self._tree.find(key) or self._tier.find(self._name, key)
