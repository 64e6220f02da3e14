"""The cached pages of one group by key, and their eviction order (least recently used first)."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from jaxkv.cache.kept_pages.keys import PageKey, page_key

_REMEMBERED = 4096
"""Number of latest evictions whose tick is recorded, for `explain`."""

_HASHED = 1024
"""Most keys that one check computes anew, which takes longer than all else of it."""

ENDED, HIT = 1, 2
"""Marks of pages in a prefix's tail: the pages that the window sees at its end. Tails are evicted after other pages.

ENDED: a sequence was published up to this tail. HIT, the stronger mark: a sequence began after this tail. The tail of a
checkpoint (`kept_states`) is another thing: its copy of a page.
"""


Rank = tuple[bool, int, int, bytes]
"""Sort key of eviction: (is a tail, last use in ticks, page table position, digest). Smallest is evicted first."""


@dataclass(slots=True)
class Node:
    """One cached page.

    Attributes:
        key: its key.
        page: its page id.
        index: its position in a page table.
        tick: tick of its last use.
        children: number of cached pages directly after it; counted where only leaves are evicted.
        tail: `ENDED` or `HIT`; 0 outside of tails.
    """

    key: PageKey
    page: int
    index: int
    tick: int
    children: int = 0
    tail: int = 0


class PrefixTree:
    """Cached pages by key, evicted least recently used first.

    Args:
        leaf_only: True for full attention: a page is useless without the pages before it, so only pages without
            cached successors are evicted, and using a page counts as using all pages before it. False for a window:
            any page may be evicted, tails last, because a hit needs all pages of its tail.
    """

    def __init__(self, *, leaf_only: bool) -> None:
        self._leaf_only = leaf_only
        self._nodes: dict[bytes, Node] = {}
        # Heap of the ranks of evictable pages. It may hold outdated ranks, which `_current` skips.
        self._queue: list[Rank] = []
        self._evicted: OrderedDict[bytes, int] = OrderedDict()
        # Place in `_nodes` at which the next check begins to compute keys.
        self._next_hashed = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, key: PageKey) -> Node | None:
        """Returns the cached page with this key, whose tokens are compared too; `None` if there is none."""
        node = self._nodes.get(key.digest)
        return node if node is not None and node.key == key else None

    def named(self, digest: bytes) -> Node | None:
        """Returns the cached page with this digest; `None` if there is none."""
        return self._nodes.get(digest)

    def when_evicted(self, key: PageKey) -> int | None:
        """Returns the tick of a page's last eviction; `None` if it is not among the recorded evictions."""
        return self._evicted.get(key.digest)

    def add(self, key: PageKey, page: int, index: int, tick: int) -> bool:
        """Adds a page under a key; returns False and changes nothing if the key has a page already.

        Raises:
            ValueError: the page before it is needed (`leaf_only`) and not cached.
        """
        if key.digest in self._nodes:
            return False
        parent = self._nodes.get(key.parent)
        if self._leaf_only and index and parent is None:
            raise ValueError(
                f"page {page} at position {index} follows a page that is not cached; publish pages in order"
            )
        self._nodes[key.digest] = Node(key, page, index, tick)
        if self._leaf_only and parent is not None:
            parent.children += 1
        self._enqueue(self._nodes[key.digest])
        return True

    def touch(self, node: Node, tick: int, *, tail: int = 0) -> None:
        """Records a use at `tick`, and raises the page's tail mark to `tail`."""
        tail = max(node.tail, tail)
        if node.tick != tick or node.tail != tail:
            node.tick, node.tail = tick, tail
            self._enqueue(node)

    def clear_tail(self, node: Node) -> None:
        """Clears the `ENDED` mark of a page whose sequence has grown beyond it; a `HIT` mark stays."""
        if node.tail == ENDED:
            node.tail = 0
            self._enqueue(node)

    def victims(self, count: int, worth: Callable[[Node], int], tick: int) -> list[Node]:
        """Returns the pages to remove, in this order, to gain `count` pages, or as many as there are.

        Args:
            count: pages to gain.
            worth: 1 if removing a page frees it, 0 if a sequence still holds it.
            tick: the current tick; pages held by sequences that are examined count as used at this tick.
        """
        if count == 1:
            oldest = self._oldest_unused(worth, tick)
            chosen = [] if oldest is None else [oldest]
        else:
            chosen = self._longest_unused(count, worth, tick)
        if len(chosen) < count:
            # Pages that only the index holds must always be reclaimable, so their descendants that sequences
            # hold are removed from the index too.
            chosen = self._with_followers(count, worth)
        return chosen

    def remove(self, node: Node, tick: int) -> None:
        """Removes one page and records the tick for `when_evicted`.

        Raises:
            ValueError: cached pages follow it.
        """
        if node.children:
            raise ValueError(
                f"page {node.page} has {node.children} cached pages after it; remove those first"
            )
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
        """Removes all pages and recorded evictions; returns the ids of the pages."""
        pages = [node.page for node in self]
        for store in (self._nodes, self._queue, self._evicted):
            store.clear()
        return pages

    def with_descendants(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns these pages and all their descendants, last position first."""
        return sorted(_branches(nodes, self._followers()), key=lambda node: -node.index)

    def check(self) -> None:
        """Raises `ValueError` if a page has two keys, or keys, parents or heap are wrong.

        Keys are compared with those of their tokens in turn: each call computes up to `_HASHED` of them.
        """
        children = Counter(node.key.parent for node in self)
        queued = set(self._queue)
        wrong = [
            node
            for node in self._take_hashed()
            if page_key(node.key.parent, node.key.tokens) != node.key
        ]
        wrong += [
            node
            for digest, node in self._nodes.items()
            if digest != node.key.digest
            or (self._leaf_only and node.children != children[digest])
            or (self._leaf_only and node.index and node.key.parent not in self._nodes)
            or (self._may_go(node) and _rank(node) not in queued)
        ]
        ordered = all(
            self._queue[(i - 1) // 2] <= self._queue[i] for i in range(1, len(self._queue))
        )
        if wrong or not ordered or len({node.page for node in self}) != len(self):
            raise ValueError(
                f"the prefix tree of {len(self)} pages is corrupt: wrong nodes {wrong}, heap in order: {ordered}"
            )

    def _take_hashed(self) -> list[Node]:
        """Returns the next pages whose keys are to be computed; after the last ones the first ones follow."""
        start = self._next_hashed if self._next_hashed < len(self) else 0
        self._next_hashed = start + _HASHED
        return list(islice(self, start, self._next_hashed))

    def _may_go(self, node: Node) -> bool:
        return not (self._leaf_only and node.children)

    def _enqueue(self, node: Node) -> None:
        if self._may_go(node):
            heapq.heappush(self._queue, _rank(node))
        if len(self._queue) > 4 * len(self._nodes) + 64:
            self._queue = [_rank(node) for node in self if self._may_go(node)]
            heapq.heapify(self._queue)

    def _current(self, rank: Rank) -> Node | None:
        """Returns the page of a heap entry; `None` if it was removed or used since, or is no leaf any more."""
        node = self._nodes.get(rank[-1])
        return node if node is not None and _rank(node) == rank and self._may_go(node) else None

    def _oldest_unused(self, worth: Callable[[Node], int], tick: int) -> Node | None:
        """Returns what `_longest_unused` returns first, in less time; `None` if there is none.

        Its rank stays in the heap and is outdated when the page is removed.
        """
        queue, held = self._queue, []
        found = None
        while queue:
            node = self._current(queue[0])
            if node is not None and worth(node):
                found = node
                break
            heapq.heappop(queue)
            if node is not None:
                node.tick = tick
                held.append(node)
        for node in held:
            self._enqueue(node)
        return found

    def _longest_unused(self, count: int, worth: Callable[[Node], int], tick: int) -> list[Node]:
        """Returns the least recently used pages that no sequence holds.

        A page whose children are all chosen counts as a leaf.
        """
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
        """Returns the least recently used pages, each after all its descendants, which sequences may hold."""
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
        """Returns digest -> the cached pages directly after that page."""
        followers: dict[bytes, list[Node]] = {}
        for node in self:
            followers.setdefault(node.key.parent, []).append(node)
        return followers


def _rank(node: Node) -> Rank:
    """Returns the page's sort key of eviction."""
    return node.tail > 0, node.tick, node.index, node.key.digest


def _branches(roots: Iterable[Node], followers: Mapping[bytes, list[Node]]) -> list[Node]:
    """Returns the roots and all their descendants, depth first."""
    found: dict[bytes, Node] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node.key.digest not in found:
            found[node.key.digest] = node
            todo += followers.get(node.key.digest, ())
    return list(found.values())
