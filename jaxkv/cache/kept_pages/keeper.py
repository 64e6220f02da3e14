"""The pages of the prefix index: cached full pages per group and their eviction order, one reference to each."""

from collections.abc import Callable, Collection, Sequence

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.lookup import Lookup, rule_of
from jaxkv.cache.kept_pages.tree import ENDED, Node, PrefixTree
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import CacheLayout


class PageKeeper:
    """The cached pages of all paged groups.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups.

    Attributes:
        rules: group name -> which of its pages a hit needs.
        trees: group name -> its cached pages.
    """

    def __init__(self, layout: CacheLayout, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.rules = {group.name: rule_of(group) for group in layout.paged_groups}
        self.trees = {
            name: PrefixTree(leaf_only=rule.window is None) for name, rule in self.rules.items()
        }

    def look_up(self, tokens: Sequence[int], keys: PageKeys) -> list[Lookup]:
        """Returns, for each group, the cached pages of these tokens."""
        return [
            Lookup(name, rule, self.trees[name], keys.pages(tokens, rule.page_size, len(tokens)))
            for name, rule in self.rules.items()
        ]

    def publish(
        self,
        name: str,
        seq: int,
        tokens: Sequence[int],
        keys: PageKeys,
        num_tokens: int,
        tick: int,
        *,
        before: int = 0,
    ) -> int:
        """Caches the full pages of a sequence in one group that are not cached yet.

        Args:
            name: group name.
            seq: number of the sequence.
            tokens: its tokens.
            keys: its page keys.
            num_tokens: tokens whose steps have been collected without an error.
            tick: the current tick.
            before: `num_tokens` of the previous call for this sequence.

        Returns:
            The number of pages added.
        """
        rule, tree, table = self.rules[name], self.trees[name], self._allocator.pages(seq, name)
        chain = keys.pages(tokens, rule.page_size, num_tokens)
        needed = rule.needs(len(chain) * rule.page_size)
        start, first = len(chain), self._allocator.held(seq).unneeded[name]
        while start > first and tree.find(chain[start - 1]) is None:
            start -= 1
        if rule.window is not None:
            start = min(start, max(first, needed.start))
        added = 0
        for index in range(start, len(chain)):
            if tree.add(chain[index], table[index], index, tick):
                self._allocator.pool(name).keep(table[index])
                added += 1
        if rule.window is None:
            used = needed[-1:]
        else:
            used = needed
            self._clear_old_tails(tree, chain, rule.needs(before), needed)
        found = [tree.find(chain[index]) for index in used]
        self.touch(name, [node for node in found if node is not None], tick)
        return added

    def touch(self, name: str, nodes: Sequence[Node], tick: int, *, tail: int = ENDED) -> None:
        """Marks pages as used at `tick`.

        Without a window the last page is enough: only leaves are evicted, so it protects the pages before it.

        Args:
            name: group name.
            nodes: the pages that a sequence needs in this group.
            tick: the current tick.
            tail: `ENDED` or `HIT`: the reason to evict these pages of a window after others.
        """
        tree = self.trees[name]
        if self.rules[name].window is None:
            for node in nodes[-1:]:
                tree.touch(node, tick)
        else:
            for node in nodes:
                tree.touch(node, tick, tail=tail)

    @staticmethod
    def _clear_old_tails(
        tree: PrefixTree, chain: Sequence[PageKey], before: range, needed: range
    ) -> None:
        """Clears the `ENDED` mark of pages that the sequence needed at its last `publish` and needs no more."""
        for index in range(before.start, min(before.stop, needed.start, len(chain))):
            node = tree.find(chain[index])
            if node is not None:
                tree.clear_tail(node)

    def worth(self, name: str, spared_copies: Collection[int]) -> Callable[[Node], int]:
        """Returns a function that is 1 for a page whose removal gains a page: it becomes free or needs no copy."""
        pool = self._allocator.pool(name)
        return lambda node: int(pool.references(node.page) == 1 or node.page in spared_copies)

    def held_by(self, seq: int, name: str) -> list[Node]:
        """Returns the cached pages that a sequence holds in a group and all their descendants, last position first."""
        tree, first = self.trees[name], self._allocator.held(seq).unneeded[name]
        pages = set(self._allocator.pages(seq, name)[first:])
        return tree.with_descendants([node for node in tree if node.page in pages])

    def remove(self, name: str, node: Node, tick: int) -> None:
        """Removes a page from the cache and drops its reference."""
        self.trees[name].remove(node, tick)
        self._allocator.pool(name).release_kept(node.page)

    def clear(self) -> None:
        """Removes all pages and drops their references."""
        for name, tree in self.trees.items():
            for page in tree.clear():
                self._allocator.pool(name).release_kept(page)

    def check(self, name: str, others: Sequence[int]) -> None:
        """Checks one group.

        Args:
            name: group name.
            others: pages of this group that checkpoints hold.

        Raises:
            ValueError: the tree is corrupt, or its pages and `others` are not what the prefix owner has.
        """
        tree, kept = self.trees[name], self._allocator.pool(name).kept
        tree.check()
        pages = {node.page for node in tree} | {*others}
        if len(pages) != len(tree) + len(others):
            raise ValueError(
                f"group {name!r}: a page of {list(others)} belongs to two checkpoints, or to a checkpoint and the tree"
            )
        if pages != kept:
            raise ValueError(
                f"group {name!r}: the index has the pages {sorted(pages - kept)} without a reference, "
                f"and references to {sorted(kept - pages)} without an entry"
            )
