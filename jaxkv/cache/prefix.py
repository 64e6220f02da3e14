"""The prefix index: full pages that outlive their sequences, found again by the tokens they hold.

A page is kept under a name hashed from all tokens up to its end. The index holds one reference to it; once it is the
only one, the page may be evicted when a sequence needs room. It knows tokens and pages, never what a page holds.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from jaxkv.cache.accounts import Accounts, Match
from jaxkv.cache.prefix_keys import PageKeys, cache_root
from jaxkv.cache.prefix_match import Lookup, longest, rule_of
from jaxkv.cache.prefix_report import (
    NO_CHECKPOINT,
    NOT_PAGED,
    Explanation,
    PrefixStats,
    report_group,
    why_no_more,
)
from jaxkv.cache.prefix_tree import Node, PrefixTree
from jaxkv.cache.spec import CacheLayout


class PrefixIndex:
    """Finds the longest beginning of a text that every group still has, and keeps what sequences computed.

    A sequence begins with `adopt`; what its collected steps computed is `publish`ed. One thread uses it.

    Args:
        layout: the groups.
        accounts: the books of the same groups; they ask this index for pages when those that are free run out.
        identity: the model, its weights and whatever else changes what a page of given tokens holds.
        secret: where keys start from; `None` draws one at random, which nobody outside can know.
    """

    def __init__(
        self,
        layout: CacheLayout,
        accounts: Accounts,
        *,
        identity: str = "",
        secret: bytes | None = None,
    ) -> None:
        self._accounts = accounts
        self._root = cache_root(
            secrets.token_bytes(32) if secret is None else secret, layout, identity
        )
        self._rules = {group.name: rule_of(group) for group in layout.paged_groups}
        self._trees = {
            name: PrefixTree(leaf_only=rule.window is None) for name, rule in self._rules.items()
        }
        # Recurrent groups will accept exactly the lengths at which they have a checkpoint; so far there is none.
        self._never = "" if self._rules else NOT_PAGED
        for group in layout.state_groups:
            self._never = NO_CHECKPOINT.format(group.name)
        self._stats = PrefixStats()
        self._tick = 0
        self._epoch = 0
        accounts.attach(self)

    @property
    def stats(self) -> PrefixStats:
        """Counts since the index was made. A sequence counts when it publishes first, whether or not a page is full."""
        return replace(self._stats)

    def keys(self, salt: str | bytes | None = None) -> PageKeys:
        """Returns the keys of a new text. Texts under different salts share nothing, not even equal ones."""
        return PageKeys(self._root, salt)

    def match(self, tokens: Sequence[int], keys: PageKeys) -> Match:
        """Returns the longest beginning that a sequence could adopt now: at most all but the last token.

        Args:
            tokens: the whole text so far.
            keys: its keys, from `keys`.
        """
        return self._match(self._look_up(tokens, keys), len(tokens))

    def adopt(self, seq: int, tokens: Sequence[int], keys: PageKeys) -> Match:
        """Opens a sequence with the longest match, whose pages it holds from now on. To be used where `open` would be.

        A match that ends inside a page shares it; `reserve` replaces it by a copy before it is written.
        """
        lookups = self._look_up(tokens, keys)
        match = self._match(lookups, len(tokens))
        self._accounts.adopt(seq, match)
        keys.epoch = self._epoch
        keys.published = match.num_tokens
        keys.begun = (match.num_tokens, len(tokens) - match.num_tokens)
        self._tick += 1
        for lookup in lookups:
            self._touch(lookup.name, lookup.needed_nodes(match.num_tokens))
        return match

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
        computed = self._accounts.num_tokens(seq)
        if keys.epoch is None or num_tokens > min(computed, len(tokens)):
            raise ValueError(
                f"sequence {seq} has {computed} tokens computed of the {len(tokens)} given, got {num_tokens} to "
                f"publish{'' if keys.epoch is not None else ', by keys that never began a sequence (see adopt)'}"
            )
        self._count_beginning(keys)
        before, keys.published = keys.published, num_tokens
        sizes = {rule.page_size for rule in self._rules.values()}
        filled = any(before // size < num_tokens // size for size in sizes)
        if not filled or self._never or keys.epoch != self._epoch:
            return 0
        self._tick += 1
        return sum(self._publish(name, seq, tokens, keys, num_tokens) for name in self._trees)

    def withdraw(self, seq: int) -> int:
        """Forgets every page that a sequence holds, and what follows them; returns how many.

        For a sequence whose numbers went wrong: nobody shall begin from its pages.
        """
        count = 0
        for name, tree in self._trees.items():
            pages = set(self._accounts.pages(seq, name)[self._accounts.num_unneeded(seq, name) :])
            doomed = tree.with_descendants([node for node in tree if node.page in pages])
            for node in doomed:
                self._remove(name, node)
            count += len(doomed)
        return count

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Evicts just as many pages as are missing in each group; returns False and evicts none if there are too few.

        The longest unused go first; a page of a full-attention group, after those that follow it. Pages of sequences
        stay theirs, but may be forgotten if pages that nobody holds cannot be had otherwise.

        Args:
            missing: group name -> pages to gain.
            rewritten: group name -> shared pages that will be copied, unless forgetting them leaves one holder.
        """
        gains = {name: self._sole(name, rewritten.get(name, ())) for name in missing}
        for name, count in missing.items():
            if self._accounts.pool(name).num_idle + len(gains[name]) < count:
                return False
        self._tick += 1
        for name, count in missing.items():
            worth = self._worth(name, gains[name])
            for node in self._trees[name].victims(count, worth, self._tick):
                self._remove(name, node)
                self._stats.evictions += 1
        return True

    def clear(self) -> None:
        """Forgets every page. Sequences in flight keep theirs, and will not publish what they hold."""
        for name, tree in self._trees.items():
            for page in tree.clear():
                self._accounts.pool(name).forget(page)
        self._epoch += 1

    def explain(self, tokens: Sequence[int], salt: str | bytes | None = None) -> Explanation:
        """Returns what of a prompt is in the cache, group by group, and why not more. Changes and pins nothing."""
        lookups = self._look_up(tokens, self.keys(salt))
        match = self._match(lookups, len(tokens))
        limit = len(tokens) - 1
        groups = tuple(report_group(view, self._trees[view.name], limit) for view in lookups)
        return Explanation(len(tokens), match.num_tokens, match.why, groups, self._tick)

    def check(self) -> None:
        """Raises `ValueError` if the index contradicts itself or the accounts."""
        for name, tree in self._trees.items():
            tree.check()
            pages, kept = {node.page for node in tree}, self._accounts.pool(name).kept
            if pages != kept:
                raise ValueError(
                    f"group {name!r}: the index has the pages {sorted(pages - kept)} without a reference, "
                    f"and references to {sorted(kept - pages)} without an entry"
                )

    def _look_up(self, tokens: Sequence[int], keys: PageKeys) -> list[Lookup]:
        return [
            Lookup(name, rule, self._trees[name], keys.pages(tokens, rule.page_size, len(tokens)))
            for name, rule in self._rules.items()
        ]

    def _match(self, lookups: Sequence[Lookup], num_tokens: int) -> Match:
        limit = max(0, num_tokens - 1)
        length = 0 if self._never else longest(lookups, limit)
        why = self._never or why_no_more(lookups, self._trees, length, limit)
        pages = {
            lookup.name: tuple(node.page for node in lookup.needed_nodes(length))
            for lookup in lookups
        }
        unneeded = {lookup.name: lookup.rule.needs(length).start for lookup in lookups}
        return Match(length, pages, unneeded, why)

    def _publish(
        self, name: str, seq: int, tokens: Sequence[int], keys: PageKeys, num_tokens: int
    ) -> int:
        """Keeps one group's pages after the last that is kept, and those that the next token sees."""
        rule, tree, table = self._rules[name], self._trees[name], self._accounts.pages(seq, name)
        chain = keys.pages(tokens, rule.page_size, num_tokens)
        needed = rule.needs(len(chain) * rule.page_size)
        start, first = len(chain), self._accounts.num_unneeded(seq, name)
        while start > first and tree.find(chain[start - 1]) is None:
            start -= 1
        if rule.window is not None:
            start = min(start, max(first, needed.start))
        added = 0
        for index in range(start, len(chain)):
            if tree.add(chain[index], table[index], index, self._tick):
                self._accounts.pool(name).keep(table[index])
                added += 1
        used = needed[-1:] if rule.window is None else needed
        found = [tree.find(chain[index]) for index in used]
        self._touch(name, [node for node in found if node is not None])
        return added

    def _count_beginning(self, keys: PageKeys) -> None:
        """Counts a hit or a miss once the sequence has computed something: adoptions may be undone for want of room."""
        if keys.begun is not None:
            reused, computed = keys.begun
            keys.begun = None
            self._stats.hits += reused > 0
            self._stats.misses += reused == 0
            self._stats.tokens_reused += reused
            self._stats.tokens_computed += computed

    def _touch(self, name: str, nodes: Sequence[Node]) -> None:
        """Marks pages as used now. Where only leaves go, the last stands for those before it."""
        for node in nodes[-1:] if self._rules[name].window is None else nodes:
            self._trees[name].touch(node, self._tick)

    def _sole(self, name: str, pages: Collection[int]) -> set[int]:
        """Returns those pages that one sequence and the index hold, and nobody else."""
        pool = self._accounts.pool(name)
        return {page for page in pages if page in pool.kept and pool.references(page) == 2}

    def _worth(self, name: str, spared_copies: Collection[int]) -> Callable[[Node], int]:
        """Returns what says whether to forget a page gains one: it is free then, or need not be copied."""
        pool = self._accounts.pool(name)
        return lambda node: int(pool.references(node.page) == 1 or node.page in spared_copies)

    def _remove(self, name: str, node: Node) -> None:
        self._trees[name].remove(node, self._tick)
        self._accounts.pool(name).forget(node.page)
