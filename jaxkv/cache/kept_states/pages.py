"""The pages that a checkpoint needs beside its states.

Anchors are cached full pages. A tail is a page of the checkpoint's own, where its prefix ends inside a page.
"""

from collections.abc import Callable, Mapping, Sequence

from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.lookup import HitRule
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.page_allocator import PageAllocator


class CheckpointPages:
    """Takes and finds the pages of checkpoints in all paged groups.

    Args:
        allocator: pages and states of the groups.
        trees: paged group name -> its cached pages.
        rules: paged group name -> which pages a hit needs.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        trees: Mapping[str, PrefixTree],
        rules: Mapping[str, HitRule],
    ) -> None:
        self._allocator = allocator
        self._trees = trees
        self._rules = rules

    def take_tails(
        self, seq: int, length: int, make_room: Callable[[str], bool]
    ) -> dict[str, int] | None:
        """Takes a page for the last tokens of a prefix in each group where it ends inside a page.

        Args:
            seq: number of the sequence.
            length: tokens of the prefix.
            make_room: frees a page of a group; returns whether it could.

        Returns:
            Group name -> page id, held by the prefix owner. `None`, and nothing is taken, if a group has no free page
            or the sequence has freed the page with those tokens.
        """
        tails: dict[str, int] = {}
        for name, rule in self._rules.items():
            index, inside = divmod(length, rule.page_size)
            if not inside:
                continue
            pool = self._allocator.pool(name)
            held = index >= self._allocator.held(seq).unneeded[name]
            if not held or not (pool.num_free or make_room(name)):
                self.give_back(tails)
                return None
            (tails[name],) = pool.take(1)
            pool.keep(tails[name])
            pool.release([tails[name]])
        return tails

    def give_back(self, tails: Mapping[str, int]) -> None:
        """Frees pages that `take_tails` took."""
        for name, page in tails.items():
            self._allocator.pool(name).release_kept(page)

    def anchors(
        self, tokens: Sequence[int], keys: PageKeys, length: int
    ) -> tuple[tuple[str, bytes], ...] | None:
        """Returns the cached full pages that a hit of `length` tokens needs; `None` if one is not cached.

        In a full-attention group only the last page is listed: the pages before it are evicted after it.
        """
        anchors = []
        for name, rule in self._rules.items():
            chain = keys.pages(tokens, rule.page_size, length)
            needed = rule.needs(length)
            full = range(needed.start, min(needed.stop, len(chain)))
            for index in full[-1:] if rule.window is None else full:
                if self._trees[name].find(chain[index]) is None:
                    return None
                anchors.append((name, chain[index].digest))
        return tuple(anchors)

    def is_whole(
        self, length: int, tails: Mapping[str, int], anchors: Sequence[tuple[str, bytes]]
    ) -> bool:
        """Whether all anchors are cached, and tails are in exactly the groups where the prefix ends inside a page."""
        off = {name for name, rule in self._rules.items() if length % rule.page_size}
        lost = [name for name, digest in anchors if self._trees[name].named(digest) is None]
        return set(tails) == off and not lost
