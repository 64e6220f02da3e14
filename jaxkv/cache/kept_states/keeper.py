"""The checkpoints of the prefix index: where sequences make them, how many are kept, and which is evicted first.

A checkpoint has the states of all recurrent groups after one prefix. In each paged group where the prefix ends inside a
page, it also has a copy of that page, its tail. The keeper holds one reference to each state and to each tail.

Checkpoints are planned when a sequence begins. A planned one is pending while a step writes its states, and is then
kept. The current states of a sequence can be kept as a checkpoint too. A checkpoint is confirmed when the step that
wrote it was collected without an error; only then can a sequence begin from it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.lookup import HitRule, Lookup
from jaxkv.cache.kept_pages.stats import PrefixStats
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
from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.spec import CacheLayout
from jaxkv.config.checkpoint_policy import CheckpointPolicy

_UNPAGED = 64
"""Tokens per hashed page where no group is paged."""


class StateKeeper:
    """A bounded number of checkpoints, evicted least recently used first. It never takes a state from a sequence.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups.
        trees: paged group name -> its cached pages.
        rules: paged group name -> which pages a hit needs.
        capacity: most checkpoints, pending ones included.
        policy: the lengths at which sequences make checkpoints.
        stats: the counters to update.
        before_eviction: called with each checkpoint that is evicted, before its states and pages are released.

    A `tick` is a time on the prefix index's clock of uses.

    Raises:
        ValueError: `capacity` is negative, or the policy contradicts the layout's chunk size.
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
        before_eviction: Callable[[Checkpoint], None],
    ) -> None:
        if capacity < 0:
            raise ValueError(
                f"the number of checkpoints must be at least 0, got {capacity}; give 0 to keep none"
            )
        policy.grid_for(layout.chunk_size)
        size = min((rule.page_size for rule in rules.values()), default=_UNPAGED)
        self.capacity = capacity if layout.state_groups else 0
        self.groups = tuple(group.name for group in layout.state_groups)
        self.policy = policy
        self.kept = Checkpoints(size)
        self._chunk = layout.chunk_size
        self._allocator = allocator
        self._pages = CheckpointPages(allocator, trees, rules)
        self._page_sizes = {name: rule.page_size for name, rule in rules.items()}
        self._stats = stats
        self._before_eviction = before_eviction
        self._seen = SeenTexts(size)
        self._plans = Plans(allocator)
        self._tick = 0

    def longest(
        self, lookups: Sequence[Lookup], tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> Checkpoint | None:
        """Returns the longest checkpoint of a prefix up to `limit` tokens that every paged group accepts."""
        for one in self.kept.along(keys, tokens) if self.capacity else ():
            if one.length <= limit and all(
                lookup.accepts(one.length, tail=one.tails.get(lookup.name)) for lookup in lookups
            ):
                return one
        return None

    def plan(self, seq: int, tokens: Sequence[int], keys: PageKeys, skipped: int) -> None:
        """Plans the checkpoints that a new sequence makes, and records their lengths in `keys`.

        Args:
            seq: number of the sequence.
            tokens: its tokens.
            keys: its page keys.
            skipped: tokens that it does not compute, because the prefix index has them.
        """
        if not self.capacity:
            return
        shared_tokens = keys.shared_tokens
        # A preempted sequence begins again with the same keys; its own tokens are not an earlier prompt.
        if shared_tokens is None:
            shared_tokens = self._seen.shared_tokens(keys, tokens)
            self._seen.add(keys, tokens)
        places = []
        for place in self.policy.places(len(tokens), shared_tokens, self._chunk):
            key = self._key(tokens, keys, place)
            if place > skipped and self.kept.find(key) is None:
                places.append(place)
                self._plans.add(seq, key)
        keys.plan(shared_tokens, tuple(places))

    @property
    def has_plans(self) -> bool:
        """Whether an open sequence has yet to make a checkpoint."""
        self._plans.remove_idle()
        return len(self._plans) > 0

    def awaits(self, tokens: Sequence[int], keys: PageKeys, skipped: int, limit: int) -> bool:
        """Whether an open sequence has yet to make a checkpoint of these tokens after (`skipped`, `limit`] tokens."""
        return any(
            self._key(tokens, keys, length).digest == digest
            for digest, length in self._plans.between(skipped, limit)
        )

    def take_pending(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, length: int
    ) -> Mapping[str, int] | None:
        """Takes free states for a pending checkpoint: a step will write the states after `length` tokens to them.

        Returns:
            Recurrent group name -> state id. `None` if the checkpoint exists, another sequence makes it, or all states
            are in use.
        """
        key = self._key(tokens, keys, length)
        self._plans.remove_idle()
        if not self._plans.may_make(seq, key) or self.kept.find(key) is not None:
            return None
        states = None
        if self._make_room(seq):
            states = self._allocator.take_pending_checkpoint(seq, length)
            while states is None and self._evict_one(seq):
                states = self._allocator.take_pending_checkpoint(seq, length)
        if states is None:
            self._plans.remove(key)
            self._stats.checkpoints_dropped += 1
            return None
        self._plans.claim(seq, key)
        return states

    def drop_pending(self, seq: int, length: int) -> None:
        """Releases the states of a pending checkpoint."""
        self._allocator.drop_pending_checkpoint(seq, length)

    def store(
        self,
        seq: int,
        tokens: Sequence[int],
        keys: PageKeys,
        length: int,
        tick: int,
        make_room: Callable[[str], bool],
        *,
        current: bool = False,
        confirmed: bool = True,
    ) -> list[PageCopy]:
        """Makes a checkpoint of states that a step has written.

        Args:
            seq: number of the sequence.
            tokens: its tokens.
            keys: its page keys.
            length: tokens after which the states are.
            tick: the current tick.
            make_room: frees a page of a group; returns whether it could.
            current: True to keep the sequence's current states; False to keep those of its pending checkpoint.
            confirmed: the step was collected without an error.

        Returns:
            The page copies to make before any other program runs; if they fail, call `withdraw_made`.
        """
        self._tick = tick
        key = self._key(tokens, keys, length)
        wanted = self.kept.find(key) is None and self._plans.may_make(seq, key)
        tails = anchors = None
        if wanted and (not current or self._make_room(seq)):
            tails = self._pages.take_tails(seq, length, make_room)
            # After `take_tails`, because that may evict a page that the checkpoint needs.
            anchors = None if tails is None else self._pages.anchors(tokens, keys, length)
            self._stats.checkpoints_dropped += anchors is None
        if tails is None or anchors is None:
            self._pages.give_back(tails or {})
            if not current:
                self.drop_pending(seq, length)
            return []
        states = (
            self._allocator.keep_current_states(seq)
            if current
            else self._allocator.keep_pending_checkpoint(seq, length)
        )
        if states is None:
            self._pages.give_back(tails)
            return []
        self._plans.remove(key)
        chain = tuple(keys.pages(tokens, self.kept.page_size, length))
        self.kept.add(Checkpoint(key, states, tails, anchors, chain, seq, tick, confirmed))
        self._stats.checkpoints += 1
        return [
            PageCopy(name, self._allocator.pages(seq, name)[length // self._page_sizes[name]], page)
            for name, page in tails.items()
        ]

    def remove(self, checkpoint: Checkpoint, tick: int) -> None:
        """Removes a checkpoint and drops its references; sequences that share its states keep them."""
        self.kept.remove(checkpoint, tick)
        for name, state in (*checkpoint.states.items(), *checkpoint.tails.items()):
            self._allocator.pool(name).release_kept(state)

    def could_have_room(self, key: CheckpointKey) -> bool:
        """Whether `has_room` would be true; evicts nothing."""
        if self.kept.find(key) is not None:
            return True
        return self.num_spare() > 0

    def num_spare(self) -> int:
        """Returns how many checkpoints `has_room` would make room for; evicts nothing."""
        self._plans.remove_idle()
        busy = sum(not self._is_unread(one) for one in self.kept)
        return max(0, self.capacity - busy - self._plans.num_claimed())

    def has_room(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint may be swapped in from the host; evicts others to make room."""
        return self.kept.find(key) is not None or self._make_room(None)

    def restore(self, checkpoint: Checkpoint, tick: int) -> None:
        """Adds a checkpoint that was swapped in, whose states and pages a sequence holds; call `has_room` first."""
        checkpoint.tick = tick
        self.kept.add(checkpoint)
        for name, unit in (*checkpoint.states.items(), *checkpoint.tails.items()):
            self._allocator.pool(name).keep(unit)

    def reclaim_states(self, missing: Mapping[str, int], tick: int) -> None:
        """Evicts checkpoints until each group has `missing` more free states; the caller knows there are enough."""
        self._tick = tick
        goals = {name: self._free(name) + count for name, count in missing.items()}
        for one in self.kept:
            short = [name for name, goal in goals.items() if self._free(name) < goal]
            if any(self._is_idle(name, one.states[name]) for name in short):
                self._evict(one)

    def reclaim_tails(
        self, name: str, count: int, spared_copies: Collection[int], tick: int
    ) -> None:
        """Evicts checkpoints until `count` tails are gained, see `num_tails`."""
        self._tick = tick
        goal = self.num_tails(name, spared_copies) - count
        for one in self.kept:
            if self.num_tails(name, spared_copies) <= goal:
                return
            page = one.tails.get(name)
            if page is not None and (page in spared_copies or self._is_idle(name, page)):
                self._evict(one)

    def tails(self, name: str) -> list[int]:
        """Returns the tails of all checkpoints in a group."""
        return [one.tails[name] for one in self.kept if name in one.tails]

    def num_tails(self, name: str, spared_copies: Collection[int]) -> int:
        """Returns how many pages the eviction of all tails gains: tails no sequence shares, or in `spared_copies`."""
        return sum(page in spared_copies or self._is_idle(name, page) for page in self.tails(name))

    def withdraw(self, seq: int, origin: bytes | None, tick: int) -> int:
        """Removes the checkpoints that a sequence made and the one it began from, `origin`; returns how many."""
        doomed = [one for one in self.kept if one.maker == seq or one.key.digest == origin]
        for one in doomed:
            self.remove(one, tick)
        return len(doomed)

    def withdraw_made(self, seq: int, tick: int) -> None:
        """Removes the checkpoints that a sequence made; the sequence may have ended."""
        for one in self.kept:
            if one.maker == seq:
                self.remove(one, tick)

    def confirm(self, seq: int, tick: int, *, good: bool) -> None:
        """Confirms a sequence's unconfirmed checkpoints, or removes them if their step was not `good`."""
        for one in self.kept:
            if one.maker == seq and not one.confirmed:
                one.confirmed = True
                if not good:
                    self.remove(one, tick)

    def forget_unconfirmed(self, tick: int) -> None:
        """Removes all unconfirmed checkpoints, whose steps will never be collected."""
        for one in self.kept:
            if not one.confirmed:
                self.remove(one, tick)

    def clear(self) -> None:
        """Removes all checkpoints, plans and recorded prompts."""
        for one in self.kept.clear():
            for name, page in (*one.states.items(), *one.tails.items()):
                self._allocator.pool(name).release_kept(page)
        self._plans.clear()
        self._seen.clear()

    def check(self) -> None:
        """Raises `ValueError` if checkpoints contradict each other, the cached pages or the allocator."""
        self.kept.check()
        for name in self.groups:
            states = [one.states[name] for one in self.kept]
            kept = self._allocator.pool(name).kept
            if len(set(states)) != len(states) or set(states) != kept:
                raise ValueError(
                    f"group {name!r}: checkpoints have the states {sorted(states)}, but the prefix owner holds "
                    f"{sorted(kept)}"
                )
        for one in self.kept:
            if not self._pages.is_whole(one.length, one.tails, one.anchors):
                raise ValueError(
                    f"the checkpoint after {one.length} tokens lacks some of its full pages {one.anchors}, "
                    f"or has pages of its own in the wrong groups: {sorted(one.tails)}"
                )
        if len(self.kept) > self.capacity:
            raise ValueError(
                f"{len(self.kept)} checkpoints are kept, more than the capacity {self.capacity}"
            )

    def _key(self, tokens: Sequence[int], keys: PageKeys, length: int) -> CheckpointKey:
        return checkpoint_key(keys, tokens, length, self.kept.page_size)

    def _free(self, name: str) -> int:
        return self._allocator.pool(name).num_free

    def _is_idle(self, name: str, page: int) -> bool:
        """Whether only the keeper holds a page or state."""
        return self._allocator.pool(name).references(page) == 1

    def _make_room(self, seq: int | None) -> bool:
        """Evicts checkpoints until there is room for one more; returns whether there is.

        Args:
            seq: the sequence that makes it, whose own checkpoints are not evicted; `None` for a swap-in.
        """
        if not self.capacity:
            return False
        self._plans.remove_idle()
        begun = self._plans.num_claimed()
        while len(self.kept) + begun >= self.capacity:
            if not self._evict_one(seq):
                return False
        return True

    def _is_unread(self, one: Checkpoint) -> bool:
        """Whether no sequence shares the states of a checkpoint."""
        return all(self._is_idle(name, state) for name, state in one.states.items())

    def _evict_one(self, seq: int | None) -> bool:
        """Evicts the least recently used checkpoint whose states no sequence shares; returns whether there was one.

        Checkpoints that `seq` made itself stay: its earlier ones are the most likely to be shared.
        """
        for one in self.kept:
            if one.maker != seq and self._is_unread(one):
                self._evict(one)
                return True
        return False

    def _evict(self, one: Checkpoint) -> None:
        """Removes a checkpoint to make room."""
        self._before_eviction(one)
        self.remove(one, self._tick)
        self._stats.checkpoint_evictions += 1
