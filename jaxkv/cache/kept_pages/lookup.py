"""The longest prefix hit: which lengths one group accepts, and the longest that all groups accept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxkv.cache.kept_pages.keys import PageKey
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.spec import Group, PagedSpec
from jaxkv.cache.windows import first_seen


@dataclass(frozen=True)
class HitRule:
    """The rule of one paged group for the pages that a sequence needs to begin after some tokens.

    Attributes:
        page_size: tokens per page.
        window: tokens that a query sees, its own included; `None` for all.
    """

    page_size: int
    window: int | None

    def needs(self, length: int) -> range:
        """Returns the table positions of the pages whose tokens the token at position `length` sees.

        They include the page that token `length` is written to, if earlier tokens have begun it. They always include
        the page of token `length - 1`, even for a window of 1, so that every hit has at least one page.
        """
        first = first_seen(self.window, length)
        return range(first // self.page_size, -(-length // self.page_size))


def rule_of(group: Group) -> HitRule:
    """Returns the hit rule of a paged group."""
    assert isinstance(group.spec, PagedSpec)
    return HitRule(group.spec.page_size, group.spec.window)


@runtime_checkable
class Finder(Protocol):
    """Finds pages of one group by key: a prefix tree, or several tiers together."""

    def find(self, key: PageKey) -> Node | None:
        """Returns the page with this key, whose tokens are compared too."""
        ...


class Lookup:
    """The cached pages of one token sequence in one group.

    Attributes:
        name: group name.
        rule: hit rule of the group.
        keys: keys of the full pages.
        nodes: for each key, the cached page or `None`.
    """

    def __init__(self, name: str, rule: HitRule, tree: Finder, keys: Sequence[PageKey]) -> None:
        self.name = name
        self.rule = rule
        self.keys = keys
        self.nodes: list[Node | None] = [tree.find(key) for key in keys]
        self._run: list[int] = []  # Consecutive cached pages that end at each position.
        run = 0
        for node in self.nodes:
            run = run + 1 if node is not None else 0
            self._run.append(run)

    @property
    def most(self) -> int:
        """An upper bound of the tokens of a hit."""
        kept = [index for index, run in enumerate(self._run) if run]
        return (kept[-1] + 1) * self.rule.page_size if kept else 0

    def full(self, length: int) -> int:
        """Returns how many leading tokens, up to `length`, have all their full pages cached; 0 for a window group."""
        if self.rule.window is not None or not self._run:
            return 0
        run = max((n for index, n in enumerate(self._run) if n == index + 1), default=0)
        return min(run, length // self.rule.page_size) * self.rule.page_size

    def accepts(self, length: int, *, tail: int | None = None) -> bool:
        """Whether this group has the pages that a sequence needs to begin after `length` tokens.

        Args:
            length: tokens to skip, at least 1; at most `most`, or the length of a checkpoint.
            tail: a page with the last tokens of a checkpoint that ends inside a page; it replaces the last needed page.
        """
        needed = self.rule.needs(length)
        if tail is not None:
            needed = needed[:-1]
        last = needed.stop - 1
        return not needed or (last < len(self._run) and self._run[last] >= len(needed))

    def missing(self, length: int) -> int | None:
        """Returns the first page table position that a hit of `length` tokens needs and that is not cached."""
        for index in self.rule.needs(length):
            if index >= len(self.nodes) or self.nodes[index] is None:
                return index
        return None

    def needed_nodes(self, length: int) -> list[Node]:
        """Returns the cached full pages that a hit of `length` tokens needs; the groups accept this length."""
        found = [self.nodes[index] for index in self.rule.needs(length) if index < len(self.nodes)]
        return [node for node in found if node is not None]


def longest(lookups: Sequence[Lookup], limit: int) -> int:
    """Returns the greatest length up to `limit` that every group accepts.

    A longer length within the same page needs no further page, so only the limit and page ends are tried.
    """
    length = min((limit, *(lookup.most for lookup in lookups)))
    while length > 0 and not all(lookup.accepts(length) for lookup in lookups):
        length = next_shorter(lookups, length)
    return max(length, 0)


def next_shorter(lookups: Sequence[Lookup], length: int) -> int:
    """Returns the last page end before `length`, over the page sizes of all groups."""
    sizes = {lookup.rule.page_size for lookup in lookups}
    return max((length - 1) // size * size for size in sizes)


def next_longer(lookups: Sequence[Lookup], length: int) -> int:
    """Returns the first page end after `length`, over the page sizes of all groups."""
    sizes = {lookup.rule.page_size for lookup in lookups}
    return min((length // size + 1) * size for size in sizes)
