"""The paged half of the prefix index: which full pages are kept, and which go first. It holds one reference to each."""

from collections.abc import Callable, Collection, Sequence

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.lookup import Lookup, rule_of
from jaxkv.cache.kept_pages.tree import ENDED, Node, PrefixTree
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import CacheLayout


class PageKeeper:
    """The kept pages of all paged groups.

    Args:
        layout: the groups.
        allocator: pages and states of the same groups.

    Attributes:
        rules: group's name -> what a sequence needs of it.
        trees: group's name -> its kept pages.
    """

    def __init__(self, layout: CacheLayout, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.rules = {group.name: rule_of(group) for group in layout.paged_groups}
        self.trees = {
            name: PrefixTree(leaf_only=rule.window is None) for name, rule in self.rules.items()
        }

    def look_up(self, tokens: Sequence[int], keys: PageKeys) -> list[Lookup]:
        """Returns what each group keeps of a text."""
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
        """Keeps a sequence's pages in one group after the last that is kept, and those that the next token sees.

        Args:
            name: the group's.
            seq: whose pages.
            tokens: its text.
            keys: its keys.
            num_tokens: tokens whose steps were good.
            tick: now.
            before: so many of them were offered before.

        Returns:
            How many are new.
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
            self._pass_by(tree, chain, rule.needs(before), needed)
        found = [tree.find(chain[index]) for index in used]
        self.touch(name, [node for node in found if node is not None], tick)
        return added

    def touch(self, name: str, nodes: Sequence[Node], tick: int, *, tail: int = ENDED) -> None:
        """Marks pages as used now. Where only leaves go, the last stands for those before it.

        Args:
            name: the group's.
            nodes: what a sequence needs of it.
            tick: now.
            tail: why the pages of a window are kept longer than others.
        """
        tree = self.trees[name]
        if self.rules[name].window is None:
            for node in nodes[-1:]:
                tree.touch(node, tick)
        else:
            for node in nodes:
                tree.touch(node, tick, tail=tail)

    @staticmethod
    def _pass_by(tree: PrefixTree, chain: Sequence[PageKey], before: range, needed: range) -> None:
        """Says of pages that a text needed when it was published last, and needs no more, that it goes on."""
        for index in range(before.start, min(before.stop, needed.start, len(chain))):
            node = tree.find(chain[index])
            if node is not None:
                tree.pass_by(node)

    def worth(self, name: str, spared_copies: Collection[int]) -> Callable[[Node], int]:
        """Returns what says whether to forget a page gains one: it is free then, or need not be copied."""
        pool = self._allocator.pool(name)
        return lambda node: int(pool.references(node.page) == 1 or node.page in spared_copies)

    def held_by(self, seq: int, name: str) -> list[Node]:
        """Returns the kept pages that a sequence holds in one group, and all that follow them, last ones first."""
        tree, first = self.trees[name], self._allocator.held(seq).unneeded[name]
        pages = set(self._allocator.pages(seq, name)[first:])
        return tree.with_descendants([node for node in tree if node.page in pages])

    def remove(self, name: str, node: Node, tick: int) -> None:
        """Forgets a page."""
        self.trees[name].remove(node, tick)
        self._allocator.pool(name).forget(node.page)

    def clear(self) -> None:
        """Forgets every page."""
        for name, tree in self.trees.items():
            for page in tree.clear():
                self._allocator.pool(name).forget(page)

    def check(self, name: str, others: Sequence[int]) -> None:
        """Raises `ValueError` if a group's entries are not the pages that are kept, but for `others`."""
        tree, kept = self.trees[name], self._allocator.pool(name).kept
        tree.check()
        pages = {node.page for node in tree} | {*others}
        if len(pages) != len(tree) + len(others):
            raise ValueError(f"group {name!r}: a page of {list(others)} is kept for two ends")
        if pages != kept:
            raise ValueError(
                f"group {name!r}: the index has the pages {sorted(pages - kept)} without a reference, "
                f"and references to {sorted(kept - pages)} without an entry"
            )
