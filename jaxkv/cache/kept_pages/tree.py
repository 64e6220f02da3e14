"""The pages of one group that are kept for reuse, and which of them goes first. Knows keys and ticks, holds no page."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxkv.cache.kept_pages.keys import PageKey, page_key

_REMEMBERED = 4096
"""Evictions that can be explained afterwards."""

ENDED, HIT = 1, 2
"""Why a page is kept longer than others: one text has come there; others are known to begin like it up to there."""


Rank = tuple[bool, int, int, bytes]
"""Whether a page goes after those of `False`, its tick, its position, its name."""


@dataclass(slots=True)
class Node:
    """One kept page.

    Attributes:
        key: its name.
        page: its id.
        index: its position in the page table of whoever uses it.
        tick: when it was last used.
        children: kept pages that follow it.
        tail: it is among the last that a window sees: `ENDED` where a text came to, `HIT` where one began from it.
    """

    key: PageKey
    page: int
    index: int
    tick: int
    children: int = 0
    tail: int = 0


class PrefixTree:
    """Kept pages by name, the longest unused first to go.

    Args:
        leaf_only: a page is useless without those before it (full attention), so only pages that no kept one
            follows may go; a page counts as used whenever one after it was. Otherwise (a window) any may go, and tails
            last: without one page of its tail, all the others of a text are of no use.
    """

    def __init__(self, *, leaf_only: bool) -> None:
        self._leaf_only = leaf_only
        self._nodes: dict[bytes, Node] = {}
        # The rank of what may go, see _rank; stale ones among them, see _current.
        self._queue: list[Rank] = []
        self._evicted: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, key: PageKey) -> Node | None:
        """Returns the page of this name that holds these very tokens, if it is kept."""
        node = self._nodes.get(key.digest)
        return node if node is not None and node.key == key else None

    def named(self, digest: bytes) -> Node | None:
        """Returns the page of this name, if it is kept."""
        return self._nodes.get(digest)

    def when_evicted(self, key: PageKey) -> int | None:
        """Returns the tick at which a page was evicted last; `None` if it never was, or too long ago."""
        return self._evicted.get(key.digest)

    def add(self, key: PageKey, page: int, index: int, tick: int) -> bool:
        """Keeps a page under a name; returns False, and keeps the first, if there is one of that name.

        Raises:
            ValueError: the page before it is not kept, but would be needed.
        """
        if key.digest in self._nodes:
            return False
        parent = self._nodes.get(key.parent)
        if self._leaf_only and index and parent is None:
            raise ValueError(f"page {page} at position {index} follows a page that is not kept")
        self._nodes[key.digest] = Node(key, page, index, tick)
        if self._leaf_only and parent is not None:
            parent.children += 1
        self._enqueue(self._nodes[key.digest])
        return True

    def touch(self, node: Node, tick: int, *, tail: int = 0) -> None:
        """Says that a page was used, and so, where only leaves go, all before it; and that it is such a tail."""
        node.tick, node.tail = tick, max(node.tail, tail)
        self._enqueue(node)

    def pass_by(self, node: Node) -> None:
        """Says that the text that came to an end here goes on: the page is no tail for that any more."""
        if node.tail == ENDED:
            node.tail = 0
            self._enqueue(node)

    def victims(self, count: int, worth: Callable[[Node], int], tick: int) -> list[Node]:
        """Returns what to remove, in this order, to gain `count` pages; all that there is may gain fewer.

        Args:
            count: pages to gain.
            worth: 1 if removing a node frees its page, 0 if a sequence holds it.
            tick: now; pages that sequences hold count as used, if it comes to looking at them.
        """
        chosen = self._longest_unused(count, worth, tick)
        if len(chosen) < count:
            # What the index alone holds must never be out of reach, so pages of sequences that follow it go too.
            chosen = self._with_followers(count, worth)
        return chosen

    def remove(self, node: Node, tick: int) -> None:
        """Forgets one page, but remembers when, for `when_evicted`."""
        if node.children:
            raise ValueError(f"page {node.page} goes before {node.children} pages that follow it")
        del self._nodes[node.key.digest]
        parent = self._nodes.get(node.key.parent)
        if self._leaf_only and parent is not None:
            parent.children -= 1
            parent.tick = max(parent.tick, node.tick)
            self._enqueue(parent)
        self._evicted[node.key.digest] = tick
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def clear(self) -> list[int]:
        """Forgets every page, and what was evicted; returns the pages."""
        pages = [node.page for node in self]
        for store in (self._nodes, self._queue, self._evicted):
            store.clear()
        return pages

    def with_descendants(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns these nodes and all that follow them, last ones first."""
        return sorted(_branches(nodes, self._followers()), key=lambda node: -node.index)

    def check(self) -> None:
        """Raises `ValueError` if a name does not follow from its tokens, a page has two, or parents or queue err."""
        children = Counter(node.key.parent for node in self)
        queued = set(self._queue)
        wrong = [
            node
            for digest, node in self._nodes.items()
            if digest != node.key.digest
            or page_key(node.key.parent, node.key.tokens) != node.key
            or (self._leaf_only and node.children != children[digest])
            or (self._leaf_only and node.index and node.key.parent not in self._nodes)
            or (self._may_go(node) and _rank(node) not in queued)
        ]
        ordered = all(
            self._queue[(i - 1) // 2] <= self._queue[i] for i in range(1, len(self._queue))
        )
        if wrong or not ordered or len({node.page for node in self}) != len(self):
            raise ValueError(f"the prefix tree of {len(self)} pages is corrupt at {wrong}")

    def _may_go(self, node: Node) -> bool:
        return not (self._leaf_only and node.children)

    def _enqueue(self, node: Node) -> None:
        if self._may_go(node):
            heapq.heappush(self._queue, _rank(node))
        if len(self._queue) > 4 * len(self._nodes) + 64:
            self._queue = [_rank(node) for node in self if self._may_go(node)]
            heapq.heapify(self._queue)

    def _current(self, rank: Rank) -> Node | None:
        """Returns the node of a queue entry, unless it is gone, was used since, or is followed by others by now."""
        node = self._nodes.get(rank[-1])
        return node if node is not None and _rank(node) == rank and self._may_go(node) else None

    def _longest_unused(self, count: int, worth: Callable[[Node], int], tick: int) -> list[Node]:
        """Chooses among what no sequence holds. A page whose last follower was chosen is a candidate like any other."""
        chosen: dict[bytes, Node] = {}
        removed: Counter[bytes] = Counter()
        bared: list[Rank] = []
        popped: dict[bytes, Node] = {}
        while len(chosen) < count and (bared or self._queue):
            source = min((heap for heap in (bared, self._queue) if heap), key=lambda heap: heap[0])
            rank = heapq.heappop(source)
            used, digest = rank[1], rank[-1]
            node = self._nodes[digest] if source is bared else self._current(rank)
            if node is None or digest in popped:
                continue
            popped[digest] = node
            if not worth(node):
                node.tick = tick
                continue
            chosen[digest] = node
            parent = self._nodes.get(node.key.parent) if self._leaf_only else None
            if parent is None:
                continue
            removed[parent.key.digest] += 1
            if removed[parent.key.digest] == parent.children:
                heapq.heappush(
                    bared, (False, max(parent.tick, used), parent.index, parent.key.digest)
                )
        for node in popped.values():
            self._enqueue(node)
        return list(chosen.values())

    def _with_followers(self, count: int, worth: Callable[[Node], int]) -> list[Node]:
        """Chooses the longest unused, each after all that follow it, whether sequences hold those or not."""
        followers = self._followers()
        chosen: dict[bytes, Node] = {}
        gained = 0
        idle = sorted(filter(worth, self), key=lambda n: (n.tail > 0, n.tick, -n.index))
        for root in idle:
            if gained >= count:
                break
            for node in reversed(_branches([root], followers)):
                if gained < count and node.key.digest not in chosen:
                    chosen[node.key.digest] = node
                    gained += worth(node)
        return list(chosen.values())

    def _followers(self) -> dict[bytes, list[Node]]:
        """Returns, by digest, the pages right after each page."""
        followers: dict[bytes, list[Node]] = {}
        for node in self:
            followers.setdefault(node.key.parent, []).append(node)
        return followers


def _rank(node: Node) -> Rank:
    """Returns what sorts nodes by who goes first."""
    return node.tail > 0, node.tick, node.index, node.key.digest


def _branches(roots: Iterable[Node], followers: Mapping[bytes, list[Node]]) -> list[Node]:
    """Returns the roots and all that follow them, one branch to its end before the next."""
    found: dict[bytes, Node] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node.key.digest not in found:
            found[node.key.digest] = node
            todo += followers.get(node.key.digest, ())
    return list(found.values())
