"""The prefix index: full pages that outlive their sequences, found again by the tokens they hold.

A page is kept under a name hashed from all tokens up to its end. The index holds one reference to it; once it is the
only one, the page may be evicted when a sequence needs room. It knows tokens and pages, never what a page holds.
Where a cache has recurrent groups, a hit is as long as a checkpoint of their states says, and never longer.
"""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from jaxkv.cache.kept_pages.keeper import PageKeeper
from jaxkv.cache.kept_pages.keys import PageKeys, cache_root
from jaxkv.cache.kept_pages.lookup import longest
from jaxkv.cache.kept_pages.tree import HIT, Node
from jaxkv.cache.kept_states.keeper import StateKeeper
from jaxkv.cache.lower_tier import LowerTier, SwapIns
from jaxkv.cache.page_allocator import Match, PageAllocator, PageCopy
from jaxkv.cache.prefix.hits import Hits
from jaxkv.cache.prefix.report import Explanation, PrefixStats
from jaxkv.cache.spec import CacheLayout
from jaxkv.config.checkpoint_policy import CheckpointPolicy

_LOG = logging.getLogger(__name__)


class PrefixIndex:
    """Finds the longest beginning of a text that every group still has, and keeps what sequences computed.

    A sequence begins with `adopt`; what its collected steps computed is `publish`ed. One thread uses it.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups; it asks this index for pages when those that are free run out.
        identity: the model, its weights and whatever else changes what a page of given tokens holds.
        secret: where keys start from; `None` draws one at random, which nobody outside can know.
        checkpoints: most checkpoints of recurrent groups; without any there is no hit in a cache that has such groups.
        policy: after which tokens they are kept.
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
        )
        self._hits = Hits(layout, self._pages, self._states)
        if self._hits.never:
            _LOG.info("no prefix will be found again: %s", self._hits.never)
        self._tick = 0
        self._epoch = 0
        allocator.attach(self)

    @property
    def stats(self) -> PrefixStats:
        """Counts since the index was made. A sequence counts when it publishes first, whether or not a page is full."""
        return replace(self._stats)

    @property
    def layout(self) -> CacheLayout:
        """The groups of the cache."""
        return self._layout

    @property
    def allocator(self) -> PageAllocator:
        """Pages and states of the device."""
        return self._allocator

    @property
    def kept_pages(self) -> PageKeeper:
        """The pages that the index keeps."""
        return self._pages

    @property
    def kept_states(self) -> StateKeeper:
        """The checkpoints of recurrent layers that the index keeps."""
        return self._states

    @property
    def why_never(self) -> str:
        """Why no prefix will ever be found again; empty if some may be."""
        return self._hits.never

    def attach_lower_tier(self, tier: LowerTier, swap_ins: SwapIns) -> None:
        """Offers what is evicted from now on to another tier, whose swap-ins end when what they need is lost.

        Raises:
            ValueError: there is such a tier already.
        """
        if self._lower is not None:
            raise ValueError("the index has a lower tier already; detach it first")
        self._lower = self._states.lower = tier
        self._swap_ins = swap_ins

    def detach_lower_tier(self) -> None:
        """Makes evicted pages be lost from now on; what lies in the lower tier is forgotten."""
        if self._lower is not None and self._swap_ins is not None:
            self._swap_ins.drop_all()
            self._lower.clear()
        self._lower = self._states.lower = self._swap_ins = None

    def advance(self) -> int:
        """Moves the clock of uses on and returns it."""
        self._tick += 1
        return self._tick

    def limit(self, tokens: Sequence[int], most: int | None) -> int:
        """Returns the most tokens that a hit may have: all but the last, all, or fewer if that is asked."""
        return self._hits.limit(tokens, most)

    def keys(self, salt: str | bytes | None = None) -> PageKeys:
        """Returns the keys of a new text. Texts under different salts share nothing, not even equal ones."""
        return PageKeys(self._root, salt)

    def match(self, tokens: Sequence[int], keys: PageKeys, *, most: int | None = None) -> Match:
        """Returns the longest beginning that a sequence could adopt now: at most all but the last token.

        Where the cache keeps outputs beside its recurrent states, even all tokens.

        Args:
            tokens: the whole text so far.
            keys: its keys, from `keys`.
            most: no more tokens than this; `None` for no such limit.
        """
        return self._hits.match(self._pages.look_up(tokens, keys), tokens, keys, most)

    def adopt(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, *, most: int | None = None
    ) -> Match:
        """Opens a sequence with the longest match, whose pages it holds from now on. To be used where `open` would be.

        A match that ends inside a page shares it; `reserve` replaces it by a copy before it is written.
        """
        lookups = self._pages.look_up(tokens, keys)
        match = self._hits.match(lookups, tokens, keys, most)
        self._allocator.adopt(seq, match)
        skipped = match.num_tokens
        keys.epoch, keys.published = self._epoch, skipped
        paged = longest(lookups, self.limit(tokens, most)) if lookups else skipped
        keys.begun = (skipped, len(tokens) - skipped, max(0, paged - skipped))
        self._tick += 1
        for lookup in lookups:
            self._pages.touch(lookup.name, lookup.needed_nodes(skipped), self._tick, tail=HIT)
        began = self._states.kept.named(match.origin) if match.origin else None
        if began is not None:
            self._states.kept.touch(began, self._tick)
        self._states.begin(seq, tokens, keys, skipped)
        return match

    def awaits(self, tokens: Sequence[int], keys: PageKeys) -> bool:
        """Whether it pays to wait before `adopt`: a sequence is about to leave a longer checkpoint of this text."""
        if not self._states.policy.wait_for_equals or not self._states.has_plans:
            return False
        match = self.match(tokens, keys)
        limit = self.limit(tokens, None)
        if not self._states.awaits(tokens, keys, match.num_tokens, limit):
            return False
        self._stats.deferrals += not keys.deferred
        keys.deferred = True
        return True

    def snapshot(
        self, seq: int, tokens: Sequence[int], keys: PageKeys, length: int
    ) -> Mapping[str, int] | None:
        """Takes a state of each recurrent group for a step to write, for one of `keys.places`; see `checkpoint`.

        They belong to the sequence until `checkpoint` or `drop_snapshot`, and go with it.

        Returns:
            Group name -> state; `None` if the checkpoint is there, or another sequence makes it, or there is no room.
        """
        if keys.epoch != self._epoch:
            return None
        return self._states.take(seq, tokens, keys, length)

    def drop_snapshot(self, seq: int, length: int) -> None:
        """Gives up what `snapshot` took."""
        self._states.drop(seq, length)

    def checkpoint(
        self,
        seq: int,
        tokens: Sequence[int],
        keys: PageKeys,
        length: int,
        *,
        live: bool = False,
        sure: bool = True,
    ) -> list[PageCopy]:
        """Keeps the states that a step was found to have written well; `publish` its pages first.

        Args:
            seq: whose step it was.
            tokens: its text.
            keys: its keys.
            length: tokens after which the states are.
            live: they are those that the sequence has come to, which will not run on; else those of `snapshot`.
            sure: the step was read. If not, nobody begins from them before `confirm`.

        Returns:
            What must be copied before anything else runs; if that fails, `withdraw_made`.
        """
        if keys.epoch != self._epoch or not self._states.capacity:
            if not live:
                self.drop_snapshot(seq, length)
            return []
        self._tick += 1
        return self._states.store(
            seq,
            tokens,
            keys,
            length,
            self._tick,
            lambda name: self.reclaim({name: 1}, {}),
            live=live,
            sure=sure,
        )

    def confirm(self, seq: int, *, good: bool) -> None:
        """Says how the step went that was not read when checkpoints of a sequence were made, which may be gone."""
        self._states.confirm(seq, self._tick, good=good)

    def forget_unsure(self) -> None:
        """Forgets the checkpoints that wait for `confirm`, since the steps under way will never be read."""
        self._states.forget_unsure(self._tick)

    def withdraw_made(self, seq: int) -> None:
        """Forgets the checkpoints that a sequence has made."""
        self._states.withdraw_made(seq, self._tick)

    def skip_snapshot(self) -> None:
        """Counts a place at which a step could not keep states."""
        self._stats.checkpoints_dropped += 1

    @property
    def policy(self) -> CheckpointPolicy:
        """After which tokens checkpoints are kept."""
        return self._states.policy

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that are kept."""
        return len(self._states.kept)

    def publish(self, seq: int, tokens: Sequence[int], keys: PageKeys, num_tokens: int) -> int:
        """Keeps the full pages of a sequence that are not kept yet, and returns how many.

        A page whose name is taken already is not kept twice: the first one stays, this sequence goes on with its own.
        Nothing is kept of a sequence that began before `clear`. It costs next to nothing while no page was filled.

        Args:
            seq: a sequence that began with `adopt`.
            tokens: its text, at least as far as `num_tokens`.
            keys: the keys it was adopted with.
            num_tokens: tokens whose steps were collected and found good.

        Raises:
            ValueError: fewer tokens are computed, or the sequence did not begin with `adopt`.
        """
        computed = self._allocator.num_tokens(seq)
        if keys.epoch is None or num_tokens > min(computed, len(tokens)):
            raise ValueError(
                f"sequence {seq} has {computed} tokens computed of the {len(tokens)} given, got {num_tokens} to "
                f"publish{'' if keys.epoch is not None else ', by keys that never began a sequence (see adopt)'}"
            )
        self._count_beginning(keys)
        before, keys.published = keys.published, num_tokens
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
        """Forgets every page that a sequence holds, and what follows them; returns how many.

        For a sequence whose numbers went wrong: nobody shall begin from its pages.
        """
        count = 0
        for name in self._trees:
            doomed = self._pages.held_by(seq, name)
            if self._lower is not None:
                self._lower.forget((name, node.key.digest) for node in doomed)
            for node in doomed:
                self._remove(name, node)
            count += len(doomed)
        return count + self._states.withdraw(seq, self._tick)

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Gives up just as much as is missing in each group; returns False and gives up nothing if there is too little.

        The longest unused go first; a page of a full-attention group, after those that follow it. With a page go the
        checkpoints that are of no use without it, and so, sometimes, more than was missing. Pages of sequences stay
        theirs, but may be forgotten if pages that nobody holds cannot be had otherwise.

        Args:
            missing: group name -> pages or states to gain.
            rewritten: group name -> shared pages that will be copied, unless forgetting them leaves one holder.
        """
        gains = {name: self._sole(name, rewritten.get(name, ())) for name in missing}
        for name, count in missing.items():
            if self._allocator.pool(name).num_idle + len(gains[name]) < count:
                return False
        self._tick += 1
        recurrent = {name: n for name, n in missing.items() if name not in self._trees}
        self._states.reclaim_states(recurrent, self._tick)
        for name in missing.keys() - recurrent.keys():
            self._reclaim_pages(name, missing[name], gains[name])
        return True

    def clear(self) -> None:
        """Forgets every page and state. Sequences in flight keep theirs, and will not publish what they hold."""
        self.lose_device()
        if self._lower is not None:
            self._lower.clear()

    def lose_device(self) -> None:
        """Does what `clear` does when the cache is lost: what has reached the host is as good as before."""
        if self._lower is not None and self._swap_ins is not None:
            self._swap_ins.drop_all()
            self._lower.lose_device()
        self._states.clear()
        self._pages.clear()
        self._epoch += 1

    def explain(self, tokens: Sequence[int], salt: str | bytes | None = None) -> Explanation:
        """Returns what of a prompt is in the cache, group by group, and why not more. Changes and pins nothing."""
        keys = self.keys(salt)
        return self._hits.explain(tokens, keys, self._tick, self._swap_ins)

    def check(self) -> None:
        """Raises `ValueError` if the index or its host tier contradicts itself, or the index the allocator."""
        for name in self._trees:
            self._pages.check(name, self._states.tails(name))
        self._states.check()
        if self._lower is not None:
            self._lower.check()

    def _reclaim_pages(self, name: str, count: int, spared_copies: set[int]) -> None:
        """Evicts pages of one group, and only then those that checkpoints have of their own."""
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
        """Counts a hit or a miss once the sequence has computed something: adoptions may be undone for want of room."""
        if keys.begun is not None:
            reused, computed, stateless = keys.begun
            keys.begun = None
            self._stats.hits += reused > 0
            self._stats.misses += reused == 0
            self._stats.tokens_reused += reused
            self._stats.tokens_computed += computed
            self._stats.tokens_without_states += stateless
            self._stats.short_of_states += stateless > 0

    def _sole(self, name: str, pages: Collection[int]) -> set[int]:
        """Returns those pages that one sequence and the index hold, and nobody else."""
        pool = self._allocator.pool(name)
        return {page for page in pages if page in pool.kept and pool.references(page) == 2}

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
            self._states.forget(checkpoint, self._tick)
