"""The paged half of the prefix index: which full pages are kept, and which go first. It holds one reference to each."""

from collections.abc import Callable, Collection, Sequence

from jaxkv.cache.accounts import Accounts
from jaxkv.cache.prefix_keys import PageKeys
from jaxkv.cache.prefix_match import Lookup, rule_of
from jaxkv.cache.prefix_tree import Node, PrefixTree
from jaxkv.cache.spec import CacheLayout


class PageKeeper:
    """The kept pages of all paged groups.

    Args:
        layout: the groups.
        accounts: the books of the same groups.

    Attributes:
        rules: group's name -> what a sequence needs of it.
        trees: group's name -> its kept pages.
    """

    def __init__(self, layout: CacheLayout, accounts: Accounts) -> None:
        self._accounts = accounts
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
    ) -> int:
        """Keeps a sequence's pages in one group after the last that is kept, and those that the next token sees.

        Returns:
            How many are new.
        """
        rule, tree, table = self.rules[name], self.trees[name], self._accounts.pages(seq, name)
        chain = keys.pages(tokens, rule.page_size, num_tokens)
        needed = rule.needs(len(chain) * rule.page_size)
        start, first = len(chain), self._accounts.num_unneeded(seq, name)
        while start > first and tree.find(chain[start - 1]) is None:
            start -= 1
        if rule.window is not None:
            start = min(start, max(first, needed.start))
        added = 0
        for index in range(start, len(chain)):
            if tree.add(chain[index], table[index], index, tick):
                self._accounts.pool(name).keep(table[index])
                added += 1
        used = needed[-1:] if rule.window is None else needed
        found = [tree.find(chain[index]) for index in used]
        self.touch(name, [node for node in found if node is not None], tick)
        return added

    def touch(self, name: str, nodes: Sequence[Node], tick: int) -> None:
        """Marks pages as used now. Where only leaves go, the last stands for those before it."""
        for node in nodes[-1:] if self.rules[name].window is None else nodes:
            self.trees[name].touch(node, tick)

    def worth(self, name: str, spared_copies: Collection[int]) -> Callable[[Node], int]:
        """Returns what says whether to forget a page gains one: it is free then, or need not be copied."""
        pool = self._accounts.pool(name)
        return lambda node: int(pool.references(node.page) == 1 or node.page in spared_copies)

    def held_by(self, seq: int, name: str) -> list[Node]:
        """Returns the kept pages that a sequence holds in one group, and all that follow them, last ones first."""
        tree, first = self.trees[name], self._accounts.num_unneeded(seq, name)
        pages = set(self._accounts.pages(seq, name)[first:])
        return tree.with_descendants([node for node in tree if node.page in pages])

    def remove(self, name: str, node: Node, tick: int) -> None:
        """Forgets a page."""
        self.trees[name].remove(node, tick)
        self._accounts.pool(name).forget(node.page)

    def clear(self) -> None:
        """Forgets every page."""
        for name, tree in self.trees.items():
            for page in tree.clear():
                self._accounts.pool(name).forget(page)

    def check(self, name: str, others: Sequence[int]) -> None:
        """Raises `ValueError` if a group's entries are not the pages that are kept, but for `others`."""
        tree, kept = self.trees[name], self._accounts.pool(name).kept
        tree.check()
        pages = {node.page for node in tree} | {*others}
        if len(pages) != len(tree) + len(others):
            raise ValueError(f"group {name!r}: a page of {list(others)} is kept for two ends")
        if pages != kept:
            raise ValueError(
                f"group {name!r}: the index has the pages {sorted(pages - kept)} without a reference, "
                f"and references to {sorted(kept - pages)} without an entry"
            )
