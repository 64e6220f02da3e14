"""The recurrent half of the prefix index: which states are kept, for how long, and what each needs to be of use.

It holds one reference to each state of a checkpoint, and to the pages that a checkpoint off the ends of pages has of
its own. It knows tokens and ids, never what a state holds.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.lookup import HitRule, Lookup
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.kept_states.checkpoints import (
    Checkpoint,
    CheckpointKey,
    Checkpoints,
    checkpoint_key,
)
from jaxkv.cache.kept_states.pages import CheckpointPages
from jaxkv.cache.kept_states.plans import Plans
from jaxkv.cache.kept_states.seen_texts import SeenTexts
from jaxkv.cache.lower_tier import LowerTier
from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.prefix.report import PrefixStats
from jaxkv.cache.spec import CacheLayout
from jaxkv.config.checkpoint_policy import CheckpointPolicy

_UNPAGED = 64
"""Tokens per name where no group is paged."""


class StateKeeper:
    """Checkpoints under a limit, the longest unused given up first. Taking one never takes a state from a sequence.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups.
        trees: paged group's name -> its kept pages.
        rules: paged group's name -> what it needs.
        capacity: most checkpoints, those that are being computed included.
        policy: where prompts leave them.
        stats: where they are counted.
    """

    def __init__(
        self,
        layout: CacheLayout,
        allocator: PageAllocator,
        trees: Mapping[str, PrefixTree],
        rules: Mapping[str, HitRule],
        *,
        capacity: int,
        policy: CheckpointPolicy,
        stats: PrefixStats,
    ) -> None:
        if capacity < 0:
            raise ValueError(f"the number of checkpoints must be at least 0, got {capacity}")
        policy.grid_for(layout.chunk_size)
        size = min((rule.page_size for rule in rules.values()), default=_UNPAGED)
        self.capacity = capacity if layout.state_groups else 0
        self.groups = tuple(group.name for group in layout.state_groups)
        self.policy = policy
        self.kept = Checkpoints(size)
        self.lower: LowerTier | None = None
        """Takes what is given up for room, if there is one."""
        self._chunk = layout.chunk_size
        self._allocator = allocator
        self._pages = CheckpointPages(allocator, trees, rules)
        self._page_sizes = {name: rule.page_size for name, rule in rules.items()}
        self._stats = stats
        self._seen = SeenTexts(size)
        self._plans = Plans(allocator)
        self._tick = 0

    def longest(
        self, lookups: Sequence[Lookup], tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> Checkpoint | None:
        """Returns the longest checkpoint of a text, up to `limit` tokens, that every paged group accepts."""
        for one in self.kept.along(keys, tokens) if self.capacity else ():
            if one.length <= limit and all(
                lookup.accepts(one.length, tail=one.tails.get(lookup.name)) for lookup in lookups
            ):
                return one
        return None

    def begin(self, seq: int, tokens: Sequence[int], keys: PageKeys, skipped: int) -> None:
        """Decides where a text that a sequence begins to compute leaves checkpoints, in `keys.places`."""
        keys.places = ()
        if not self.capacity:
            return
        if keys.agreed is None:  # A text that comes back, preempted, is no earlier one.
            keys.agreed = self._seen.agreed(keys, tokens)
            self._seen.note(keys, tokens)
        wanted = self.policy.places(len(tokens), keys.agreed, self._chunk)
        for place in wanted:
            key = self._key(tokens, keys, place)
            if place > skipped and self.kept.find(key) is None:
                keys.places += (place,)
                self._plans.mean(seq, key)

    @property
    def has_plans(self) -> bool:
        """Whether a sequence is about to leave a checkpoint."""
        self._plans.forget_idle()
        return len(self._plans) > 0

    def awaits(self, tokens: Sequence[int], keys: PageKeys, skipped: int, limit: int) -> bool:
        """Whether a sequence is about to leave a checkpoint of a text of more than `skipped`, up to `limit` tokens."""
        return any(
            self._key(tokens, keys, length).digest == digest
            for digest, length in self._plans.between(skipped, limit)
        )

    def take(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, length: int
    ) -> Mapping[str, int] | None:
        """Takes states for what a sequence will be after `length` tokens, by recurrent group's name.

        Returns:
            The states; `None` if the text has a checkpoint there, or another sequence is making it, or there is no
            room but what is in use.
        """
        key = self._key(tokens, keys, length)
        self._plans.forget_idle()
        if not self._plans.may_make(seq, key) or self.kept.find(key) is not None:
            return None
        states = None
        if self._make_room(seq):
            states = self._allocator.take_snapshot(seq, length)
            while states is None and self._evict_one(seq):
                states = self._allocator.take_snapshot(seq, length)
        if states is None:
            self._plans.end(key)
            self._stats.checkpoints_dropped += 1
            return None
        self._plans.begin(seq, key)
        return states

    def drop(self, seq: int, length: int) -> None:
        """Gives up states that were taken."""
        self._allocator.drop_snapshot(seq, length)

    def store(
        self,
        seq: int,
        tokens: Sequence[int],
        keys: PageKeys,
        length: int,
        tick: int,
        make_room: Callable[[str], bool],
        *,
        live: bool = False,
        sure: bool = True,
    ) -> list[PageCopy]:
        """Makes a checkpoint of states that a step was found to have written well.

        Args:
            seq: whose step it was.
            tokens: its text.
            keys: its keys.
            length: tokens after which the states are.
            tick: now.
            make_room: frees a page of a group, if it can.
            live: the states are those that the sequence has come to; else those that it took.
            sure: the step was read.

        Returns:
            What must be copied before anything else runs; if that fails, `withdraw_made`.
        """
        self._tick = tick
        key = self._key(tokens, keys, length)
        wanted = self.kept.find(key) is None and self._plans.may_make(seq, key)
        tails = anchors = None
        if wanted and (not live or self._make_room(seq)):
            tails = self._pages.take_tails(seq, length, make_room)
            # Last, since the room for a page may have cost a page that is needed.
            anchors = None if tails is None else self._pages.anchors(tokens, keys, length)
            self._stats.checkpoints_dropped += anchors is None
        if tails is None or anchors is None:
            self._pages.give_back(tails or {})
            if not live:
                self.drop(seq, length)
            return []
        states = (
            self._allocator.keep_states(seq) if live else self._allocator.keep_snapshot(seq, length)
        )
        if states is None:
            self._pages.give_back(tails)
            return []
        self._plans.end(key)
        self.kept.add(Checkpoint(key, states, tails, anchors, seq, tick, sure))
        self._stats.checkpoints += 1
        return [
            PageCopy(name, self._allocator.pages(seq, name)[length // self._page_sizes[name]], page)
            for name, page in tails.items()
        ]

    def forget(self, checkpoint: Checkpoint, tick: int) -> None:
        """Gives up a checkpoint; sequences that read its states keep them."""
        self.kept.remove(checkpoint, tick)
        for name, state in (*checkpoint.states.items(), *checkpoint.tails.items()):
            self._allocator.pool(name).forget(state)

    def could_have_room(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint could come back from the host if others were given up; gives up none."""
        if self.kept.find(key) is not None:
            return True
        self._plans.forget_idle()
        busy = sum(not self._is_unread(one) for one in self.kept)
        return busy + self._plans.num_begun() < self.capacity

    def has_room(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint may come back from the host, for which others may be given up."""
        return self.kept.find(key) is not None or self._make_room(None)

    def restore(self, checkpoint: Checkpoint, tick: int) -> None:
        """Keeps a checkpoint whose states and pages somebody holds; see `has_room`."""
        checkpoint.tick = tick
        self.kept.add(checkpoint)
        for name, unit in (*checkpoint.states.items(), *checkpoint.tails.items()):
            self._allocator.pool(name).keep(unit)

    def reclaim_states(self, missing: Mapping[str, int], tick: int) -> None:
        """Gives up checkpoints until the groups have so many more free states, which must be there."""
        self._tick = tick
        goals = {name: self._free(name) + count for name, count in missing.items()}
        for one in self.kept:
            short = [name for name, goal in goals.items() if self._free(name) < goal]
            if any(self._is_idle(name, one.states[name]) for name in short):
                self._evict(one)

    def reclaim_tails(
        self, name: str, count: int, spared_copies: Collection[int], tick: int
    ) -> None:
        """Gives up checkpoints for so many of the pages that they have of their own, see `num_tails`."""
        self._tick = tick
        goal = self.num_tails(name, spared_copies) - count
        for one in self.kept:
            if self.num_tails(name, spared_copies) <= goal:
                return
            page = one.tails.get(name)
            if page is not None and (page in spared_copies or self._is_idle(name, page)):
                self._evict(one)

    def tails(self, name: str) -> list[int]:
        """Returns the pages of a group that checkpoints have of their own."""
        return [one.tails[name] for one in self.kept if name in one.tails]

    def num_tails(self, name: str, spared_copies: Collection[int]) -> int:
        """Returns how many of these could be had: no sequence shares them, or one that need not copy them then."""
        return sum(page in spared_copies or self._is_idle(name, page) for page in self.tails(name))

    def withdraw(self, seq: int, tick: int) -> int:
        """Forgets what a sequence made, and what it began from; returns how many."""
        held = self._allocator.held(seq)
        doomed = [one for one in self.kept if one.maker == seq or one.key.digest == held.origin]
        for one in doomed:
            self.forget(one, tick)
        if self.lower is not None:
            self.lower.forget([("", held.origin)] if held.origin is not None else [])
            self.lower.forget_made(seq)
        return len(doomed)

    def withdraw_made(self, seq: int, tick: int) -> None:
        """Forgets what a sequence made, whether or not it is still there."""
        for one in self.kept:
            if one.maker == seq:
                self.forget(one, tick)

    def confirm(self, seq: int, tick: int, *, good: bool) -> None:
        """Says how the step went that wrote what a sequence made and was not sure of."""
        for one in self.kept:
            if one.maker == seq and not one.sure:
                one.sure = True
                if not good:
                    self.forget(one, tick)

    def forget_unsure(self, tick: int) -> None:
        """Forgets what waits for a step to be read, since none will be."""
        for one in self.kept:
            if not one.sure:
                self.forget(one, tick)

    def clear(self) -> None:
        """Forgets every checkpoint, and what was seen."""
        for one in self.kept.clear():
            for name, page in (*one.states.items(), *one.tails.items()):
                self._allocator.pool(name).forget(page)
        self._plans.clear()
        self._seen.clear()

    def check(self) -> None:
        """Raises `ValueError` if checkpoints contradict themselves, the kept pages or the allocator."""
        self.kept.check()
        for name in self.groups:
            states = [one.states[name] for one in self.kept]
            kept = self._allocator.pool(name).kept
            if len(set(states)) != len(states) or set(states) != kept:
                raise ValueError(
                    f"group {name!r}: checkpoints have the states {sorted(states)}, kept are {sorted(kept)}"
                )
        for one in self.kept:
            if not self._pages.is_whole(one.length, one.tails, one.anchors):
                raise ValueError(
                    f"the checkpoint after {one.length} tokens has lost some of its pages {one.anchors}, "
                    f"or has pages of its own in other groups than it should: {sorted(one.tails)}"
                )
        if len(self.kept) > self.capacity:
            raise ValueError(f"{len(self.kept)} checkpoints are more than {self.capacity}")

    def _key(self, tokens: Sequence[int], keys: PageKeys, length: int) -> CheckpointKey:
        return checkpoint_key(keys, tokens, length, self.kept.page_size)

    def _free(self, name: str) -> int:
        return self._allocator.pool(name).num_free

    def _is_idle(self, name: str, page: int) -> bool:
        return self._allocator.pool(name).references(page) == 1

    def _make_room(self, seq: int | None) -> bool:
        """Gives up checkpoints until a sequence, or nobody's, may make one more; returns whether it may."""
        if not self.capacity:
            return False
        self._plans.forget_idle()
        begun = self._plans.num_begun()
        while len(self.kept) + begun >= self.capacity:
            if not self._evict_one(seq):
                return False
        return True

    def _is_unread(self, one: Checkpoint) -> bool:
        return all(self._is_idle(name, state) for name, state in one.states.items())

    def _evict_one(self, seq: int | None) -> bool:
        """Gives up the longest unused checkpoint whose states no sequence reads, for another one of a sequence.

        Not one that the same sequence made: its first places are shared by the most.
        """
        for one in self.kept:
            if one.maker != seq and self._is_unread(one):
                self._evict(one)
                return True
        return False

    def _evict(self, one: Checkpoint) -> None:
        if self.lower is not None:
            self.lower.offer_checkpoint(one)
        self.forget(one, self._tick)
        self._stats.checkpoint_evictions += 1
