"""The prefix index: full pages that stay cached after their sequences end, found again by their tokens.

The key of a page is a hash of all tokens up to its end. The index holds one reference to each cached page. A page with
no other reference may be evicted when a sequence needs room.
In a cache with recurrent groups, a hit ends at a checkpoint of their states.
"""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jaxkv.cache.kept_pages.keeper import PageKeeper
from jaxkv.cache.kept_pages.keys import PageKeys, cache_root
from jaxkv.cache.kept_pages.lookup import longest
from jaxkv.cache.kept_pages.stats import PrefixStats
from jaxkv.cache.kept_pages.tree import HIT, Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint
from jaxkv.cache.kept_states.keeper import StateKeeper
from jaxkv.cache.kept_states.lower_tier import LowerTier, SwapIns
from jaxkv.cache.page_allocator import Match, PageAllocator, PageCopy
from jaxkv.cache.prefix.hits import Hits
from jaxkv.cache.prefix.report import Explanation
from jaxkv.cache.spec import CacheLayout
from jaxkv.config.checkpoint_policy import CheckpointPolicy

_LOG = logging.getLogger(__name__)


class PrefixIndex:
    """Finds the longest cached prefix of a token sequence, and caches the pages and states that sequences compute.

    A sequence begins with `adopt`, and calls `publish` after each collected step. Not thread-safe: one thread uses it.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups; it reclaims pages from this index when none is free.
        identity: the model, its weights, and everything else that changes the contents of a page of given tokens.
        secret: root of all keys; `None` draws random bytes, so that clients cannot guess keys.
        checkpoints: most checkpoints of recurrent groups. With 0, a cache with recurrent groups has no hits.
        policy: the lengths at which sequences make checkpoints; `None` for the default.

    Raises:
        ValueError: the allocator has a prefix owner already, `checkpoints` is negative, or the policy contradicts the
            layout.
    """

    def __init__(
        self,
        layout: CacheLayout,
        allocator: PageAllocator,
        *,
        identity: str = "",
        secret: bytes | None = None,
        checkpoints: int = 0,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self._layout = layout
        self._allocator = allocator
        self._lower: LowerTier | None = None
        self._swap_ins: SwapIns | None = None
        self._root = cache_root(
            secrets.token_bytes(32) if secret is None else secret, layout, identity
        )
        self._pages = PageKeeper(layout, allocator)
        self._rules, self._trees = self._pages.rules, self._pages.trees
        self._stats = PrefixStats()
        self._states = StateKeeper(
            layout,
            allocator,
            self._trees,
            self._rules,
            capacity=checkpoints,
            policy=policy or CheckpointPolicy(),
            stats=self._stats,
            before_eviction=self._offer_checkpoint,
        )
        self._hits = Hits(layout, self._pages, self._states)
        if self._hits.never:
            _LOG.info("prefix reuse is off: %s", self._hits.never)
        self._tick = 0
        self._epoch = 0
        allocator.attach(self)

    @property
    def stats(self) -> PrefixStats:
        """Counts since the index was made; a sequence is counted at its first `publish`."""
        return replace(self._stats)

    @property
    def layout(self) -> CacheLayout:
        """The groups of the cache."""
        return self._layout

    @property
    def allocator(self) -> PageAllocator:
        """The allocator of the device's pages and states."""
        return self._allocator

    @property
    def kept_pages(self) -> PageKeeper:
        """The cached pages."""
        return self._pages

    @property
    def kept_states(self) -> StateKeeper:
        """The cached checkpoints of recurrent layers."""
        return self._states

    @property
    def why_never(self) -> str:
        """The reason why no lookup can succeed; empty if one may."""
        return self._hits.never

    def attach_lower_tier(self, tier: LowerTier, swap_ins: SwapIns) -> None:
        """Offers evicted pages and checkpoints to a lower tier from now on.

        Args:
            tier: the lower tier.
            swap_ins: its swap-ins, which are cancelled when the device's cache is lost.

        Raises:
            ValueError: there is a lower tier already.
        """
        if self._lower is not None:
            raise ValueError("the index has a lower tier already; detach it first")
        self._lower = tier
        self._swap_ins = swap_ins

    def detach_lower_tier(self) -> None:
        """Clears the lower tier and cancels its swap-ins; evicted pages are lost from now on."""
        if self._lower is not None and self._swap_ins is not None:
            self._swap_ins.release_all()
            self._lower.clear()
        self._lower = self._swap_ins = None

    def advance(self) -> int:
        """Increments the tick, the clock of uses, and returns it."""
        self._tick += 1
        return self._tick

    def limit(self, tokens: Sequence[int], most: int | None) -> int:
        """Returns the most tokens of a hit: all but the last, or all if outputs are kept, and at most `most`."""
        return self._hits.limit(tokens, most)

    def keys(self, salt: str | bytes | None = None) -> PageKeys:
        """Returns the keys of a new token sequence. Sequences with different salts never share pages."""
        return PageKeys(self._root, salt)

    def match(self, tokens: Sequence[int], keys: PageKeys, *, most: int | None = None) -> Match:
        """Returns the longest cached prefix: at most all tokens but the last.

        If the cache keeps outputs beside its recurrent states, it may be all tokens.

        Args:
            tokens: all tokens so far.
            keys: their keys, from `keys`.
            most: upper limit of its tokens; `None` for no such limit.
        """
        return self._hits.match(self._pages.look_up(tokens, keys), tokens, keys, most)

    def adopt(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, *, most: int | None = None
    ) -> Match:
        """Begins a sequence that shares the pages and states of the longest match; it replaces `PageAllocator.open`.

        A match that ends inside a page shares that page; `reserve` replaces it by a copy before a step writes it.

        Args:
            seq: number of the new sequence.
            tokens: all its tokens so far.
            keys: their keys, from `keys`.
            most: upper limit of the match's tokens; `None` for no such limit.
        """
        lookups = self._pages.look_up(tokens, keys)
        match = self._hits.match(lookups, tokens, keys, most)
        self._allocator.adopt(seq, match)
        skipped = match.num_tokens
        paged = longest(lookups, self.limit(tokens, most)) if lookups else skipped
        keys.begin(self._epoch, skipped, len(tokens) - skipped, max(0, paged - skipped))
        self._tick += 1
        for lookup in lookups:
            self._pages.touch(lookup.name, lookup.needed_nodes(skipped), self._tick, tail=HIT)
        began = self._states.kept.named(match.origin) if match.origin else None
        if began is not None:
            self._states.kept.touch(began, self._tick)
        self._states.plan(seq, tokens, keys, skipped)
        return match

    def awaits(self, tokens: Sequence[int], keys: PageKeys) -> bool:
        """Whether to delay `adopt`: an open sequence is computing a longer checkpoint of these tokens."""
        if not self._states.policy.wait_for_equals or not self._states.has_plans:
            return False
        match = self.match(tokens, keys)
        limit = self.limit(tokens, None)
        if not self._states.awaits(tokens, keys, match.num_tokens, limit):
            return False
        self._stats.deferrals += keys.defer()
        return True

    def begin_checkpoint(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, length: int
    ) -> Mapping[str, int] | None:
        """Takes a state of each recurrent group for a step to write: a pending checkpoint at one of `keys.places`.

        The states belong to the sequence until `store_checkpoint` or `drop_pending_checkpoint`; its release frees them.

        Returns:
            Group name -> state id. `None` if the checkpoint exists, another sequence makes it, or there is no room.
        """
        if keys.epoch != self._epoch:
            return None
        return self._states.take_pending(seq, tokens, keys, length)

    def drop_pending_checkpoint(self, seq: int, length: int) -> None:
        """Releases the states that `begin_checkpoint` took."""
        self._states.drop_pending(seq, length)

    def store_checkpoint(
        self,
        seq: int,
        tokens: Sequence[int],
        keys: PageKeys,
        length: int,
        *,
        current: bool = False,
        confirmed: bool = True,
    ) -> list[PageCopy]:
        """Makes a checkpoint of states that a step has written; call `publish` for its pages first.

        Args:
            seq: number of the sequence.
            tokens: its tokens.
            keys: its page keys.
            length: tokens after which the states are.
            current: True to keep the sequence's current states, which no later step will change; False to keep those of
                `begin_checkpoint`.
            confirmed: the step was collected without an error. If False, no sequence begins from the checkpoint before
                `confirm`.

        Returns:
            The page copies to make before any other program runs; if they fail, call `withdraw_made`.
        """
        if keys.epoch != self._epoch or not self._states.capacity:
            if not current:
                self.drop_pending_checkpoint(seq, length)
            return []
        self._tick += 1
        return self._states.store(
            seq,
            tokens,
            keys,
            length,
            self._tick,
            lambda name: self.reclaim({name: 1}, {}),
            current=current,
            confirmed=confirmed,
        )

    def confirm(self, seq: int, *, good: bool) -> None:
        """Confirms a sequence's unconfirmed checkpoints, or removes them if their step was not `good`."""
        self._states.confirm(seq, self._tick, good=good)

    def forget_unconfirmed(self) -> None:
        """Removes all unconfirmed checkpoints, because the in-flight steps will never be collected."""
        self._states.forget_unconfirmed(self._tick)

    def withdraw_made(self, seq: int) -> None:
        """Removes the checkpoints that a sequence has made."""
        self._states.withdraw_made(seq, self._tick)

    def count_dropped_checkpoint(self) -> None:
        """Counts a checkpoint that a step's program had no room for."""
        self._stats.checkpoints_dropped += 1

    @property
    def policy(self) -> CheckpointPolicy:
        """The lengths at which sequences make checkpoints."""
        return self._states.policy

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints."""
        return len(self._states.kept)

    def publish(self, seq: int, tokens: Sequence[int], keys: PageKeys, num_tokens: int) -> int:
        """Caches the full pages of a sequence that are not cached yet; returns their number.

        If another page has the same key, that page stays in the index, and the sequence continues with its own.
        Nothing is cached for a sequence that began before `clear`. The call is cheap while no page was filled.

        Args:
            seq: a sequence that began with `adopt`.
            tokens: its tokens, at least `num_tokens`.
            keys: the keys that were given to `adopt`.
            num_tokens: tokens whose steps were collected without an error.

        Raises:
            ValueError: fewer tokens are computed or given, or the keys were never given to `adopt`.
        """
        computed = self._allocator.num_tokens(seq)
        if keys.epoch is None or num_tokens > min(computed, len(tokens)):
            raise ValueError(
                f"sequence {seq} has {computed} tokens computed of the {len(tokens)} given, got {num_tokens} to "
                f"publish{'' if keys.epoch is not None else ', by keys that never began a sequence (see adopt)'}"
            )
        self._count_beginning(keys)
        before = keys.note_published(num_tokens)
        sizes = {rule.page_size for rule in self._rules.values()}
        filled = any(before // size < num_tokens // size for size in sizes)
        if not filled or keys.epoch != self._epoch:
            return 0
        self._tick += 1
        return sum(
            self._pages.publish(name, seq, tokens, keys, num_tokens, self._tick, before=before)
            for name in self._trees
        )

    def withdraw(self, seq: int) -> int:
        """Removes the pages that a sequence holds, their descendants, and its checkpoints; returns how many there were.

        Called for a sequence with wrong values, such as NaN, so that no other sequence begins from them. The lower tier
        also drops the same, and what neither tier reaches, because that may follow a removed page.
        """
        count, origin = 0, self._allocator.held(seq).origin
        for name in self._trees:
            doomed = self._pages.held_by(seq, name)
            if self._lower is not None:
                self._lower.remove((name, node.key.digest) for node in doomed)
            for node in doomed:
                self._remove(name, node)
            count += len(doomed)
        count += self._states.withdraw(seq, origin, self._tick)
        if self._lower is not None:
            self._lower.remove([("", origin)] if origin is not None else [])
            self._lower.remove_made(seq)
            self._lower.remove_unreachable(self._has)
        return count

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Evicts the missing number of pages and states in each group; returns False and evicts nothing if it cannot.

        The least recently used are evicted first; in a full-attention group, a page after the pages that follow it.
        Evicting a page also removes the checkpoints that need it, so more may become free than was missing. Pages that
        sequences hold stay allocated, but may leave the index if unused pages before them cannot be evicted otherwise.

        Args:
            missing: group name -> number of pages or states to gain.
            rewritten: group name -> shared pages that will be copied unless dropping them leaves one holder.
        """
        gains = {name: self._sole(name, rewritten.get(name, ())) for name in missing}
        for name, count in missing.items():
            if self._allocator.pool(name).num_idle + len(gains[name]) < count:
                return False
        self._tick += 1
        recurrent = {name: n for name, n in missing.items() if name not in self._trees}
        if recurrent:
            self._states.reclaim_states(recurrent, self._tick)
        for name in missing.keys() - recurrent.keys():
            self._reclaim_pages(name, missing[name], gains[name])
        return True

    def clear(self) -> None:
        """Removes all pages and checkpoints. Open sequences keep theirs, and `publish` does nothing for them."""
        self.lose_device()
        if self._lower is not None:
            self._lower.clear()

    def lose_device(self) -> None:
        """Does what `clear` does after the device's cache is lost; entries that have reached the lower tier stay."""
        if self._lower is not None and self._swap_ins is not None:
            self._swap_ins.release_all()
            self._lower.lose_device()
        self._states.clear()
        self._pages.clear()
        self._epoch += 1

    def explain(self, tokens: Sequence[int], salt: str | bytes | None = None) -> Explanation:
        """Returns the cached part of a prompt, group by group, and why it is not longer. It changes nothing."""
        keys = self.keys(salt)
        return self._hits.explain(tokens, keys, self._tick, self._swap_ins)

    def check(self) -> None:
        """Raises `ValueError` if the index or its lower tier is inconsistent, or contradicts the allocator."""
        for name in self._trees:
            self._pages.check(name, self._states.tails(name))
        self._states.check()
        if self._lower is not None:
            self._lower.check()

    def _reclaim_pages(self, name: str, count: int, spared_copies: set[int]) -> None:
        """Evicts pages of one group, and if these are too few, checkpoints with pages of their own."""
        worth, idle = self._pages.worth(name, spared_copies), self._allocator.pool(name).num_idle
        tails = self._states.num_tails(name, spared_copies)
        from_tree = min(count, idle + len(spared_copies) - tails)
        gained = 0
        for node in self._trees[name].victims(from_tree, worth, self._tick):
            gained += worth(node)
            self._evict(name, node)
        gained += tails - self._states.num_tails(name, spared_copies)
        if gained < count:
            self._states.reclaim_tails(name, count - gained, spared_copies, self._tick)

    def _count_beginning(self, keys: PageKeys) -> None:
        """Counts a hit or a miss at a sequence's first `publish`; an adoption before that may still be undone."""
        beginning = keys.take_beginning()
        if beginning is not None:
            reused, computed, stateless = beginning
            self._stats.hits += reused > 0
            self._stats.misses += reused == 0
            self._stats.tokens_reused += reused
            self._stats.tokens_computed += computed
            self._stats.tokens_without_states += stateless
            self._stats.short_of_states += stateless > 0

    def _has(self, key: tuple[str, bytes]) -> bool:
        """Whether the device has the page with this (group name, digest)."""
        name, digest = key
        return self._trees[name].named(digest) is not None

    def _sole(self, name: str, pages: Collection[int]) -> set[int]:
        """Returns those of `pages` that the index and exactly one sequence hold."""
        pool = self._allocator.pool(name)
        return {page for page in pages if page in pool.kept and pool.references(page) == 2}

    def _offer_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._lower is not None:
            self._lower.offer_checkpoint(checkpoint)

    def _evict(self, name: str, node: Node) -> None:
        if self._lower is not None:
            for checkpoint in self._states.kept.resting_on(name, node.key.digest):
                self._lower.offer_checkpoint(checkpoint)
            self._lower.offer_page(name, node)
        self._remove(name, node)
        self._stats.evictions += 1

    def _remove(self, name: str, node: Node) -> None:
        self._pages.remove(name, node, self._tick)
        for checkpoint in self._states.kept.resting_on(name, node.key.digest):
            self._states.remove(checkpoint, self._tick)
