"""How long a hit each group accepts, one rule per kind of group, and the longest that all accept. Holds nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxkv.cache.kept_pages.keys import PageKey
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.spec import Group, PagedSpec
from jaxkv.cache.windows import first_seen


@dataclass(frozen=True)
class HitRule:
    """What a sequence needs of one paged group to begin after some tokens.

    Attributes:
        page_size: tokens per page.
        window: tokens a query sees, itself included; `None` for all.
    """

    page_size: int
    window: int | None

    def needs(self, length: int) -> range:
        """Returns the table positions that hold what token `length` sees of the tokens before it.

        The page it will be written to is among them if the tokens before it have begun it. The token just before it
        always is, even if a window of one does not see it, so that every hit has a page to show for itself.
        """
        first = first_seen(self.window, length)
        return range(first // self.page_size, -(-length // self.page_size))


def rule_of(group: Group) -> HitRule:
    """Returns the rule of a paged group."""
    assert isinstance(group.spec, PagedSpec)
    return HitRule(group.spec.page_size, group.spec.window)


@runtime_checkable
class Finder(Protocol):
    """Has the pages of one group by name: a prefix tree, or several tiers as one."""

    def find(self, key: PageKey) -> Node | None:
        """Returns the page of this name that holds these very tokens."""
        ...


class Lookup:
    """What one group keeps of a text.

    Attributes:
        name: the group's name.
        rule: the group's rule.
        keys: names of the text's full pages.
        nodes: the kept page of each, or `None`.
    """

    def __init__(self, name: str, rule: HitRule, tree: Finder, keys: Sequence[PageKey]) -> None:
        self.name = name
        self.rule = rule
        self.keys = keys
        self.nodes: list[Node | None] = [tree.find(key) for key in keys]
        self._run: list[int] = []  # Kept pages in a row that end at each position.
        run = 0
        for node in self.nodes:
            run = run + 1 if node is not None else 0
            self._run.append(run)

    @property
    def most(self) -> int:
        """No more tokens than this can be hit."""
        kept = [index for index, run in enumerate(self._run) if run]
        return (kept[-1] + 1) * self.rule.page_size if kept else 0

    def full(self, length: int) -> int:
        """Returns how many of the first tokens lie in full pages that are all kept; none, where a window is enough."""
        if self.rule.window is not None or not self._run:
            return 0
        run = max((n for index, n in enumerate(self._run) if n == index + 1), default=0)
        return min(run, length // self.rule.page_size) * self.rule.page_size

    def accepts(self, length: int, *, tail: int | None = None) -> bool:
        """Whether a sequence may begin after `length` tokens, at least 1, as far as this group is concerned.

        Args:
            length: at most `most`, or where a checkpoint is.
            tail: a page with the text's last tokens, where that checkpoint ends inside a page.
        """
        needed = self.rule.needs(length)
        if tail is not None:
            needed = needed[:-1]
        last = needed.stop - 1
        return not needed or (last < len(self._run) and self._run[last] >= len(needed))

    def missing(self, length: int) -> int | None:
        """Returns the first position that is needed for `length` tokens and not kept."""
        for index in self.rule.needs(length):
            if index >= len(self.nodes) or self.nodes[index] is None:
                return index
        return None

    def needed_nodes(self, length: int) -> list[Node]:
        """Returns the kept pages of a length that is accepted, but for one that is not full and another's."""
        found = [self.nodes[index] for index in self.rule.needs(length) if index < len(self.nodes)]
        return [node for node in found if node is not None]


def longest(lookups: Sequence[Lookup], limit: int) -> int:
    """Returns the greatest length up to `limit` that every group accepts.

    Within a page a longer length needs no more, so only the limit and the ends of pages are tried.
    """
    length = min((limit, *(lookup.most for lookup in lookups)))
    while length > 0 and not all(lookup.accepts(length) for lookup in lookups):
        length = next_shorter(lookups, length)
    return max(length, 0)


def next_shorter(lookups: Sequence[Lookup], length: int) -> int:
    """Returns the last end of a page before `length`, over all groups."""
    sizes = {lookup.rule.page_size for lookup in lookups}
    return max((length - 1) // size * size for size in sizes)


def next_longer(lookups: Sequence[Lookup], length: int) -> int:
    """Returns the first end of a page after `length`, over all groups."""
    sizes = {lookup.rule.page_size for lookup in lookups}
    return min((length // size + 1) * size for size in sizes)
