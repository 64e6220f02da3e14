"""`Router`: chooses the replica that serves a prompt, by the cached prefix and then by the load.

It keeps a record of the prompts that each replica was given, as keys of their blocks, instead of asking the replicas:
a question would wait for the end of a step. The record is as long as the replica's cache and forgets what was not used
for the longest time, as the cache does. Where the two differ, a request is computed where it need not have been.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from jaxkv.cache.spec import CacheLayout

TOKENS_PER_SEQUENCE = 256
"""A replica with one more open sequence than another is chosen only if its cached prefix is so many tokens longer."""


_WITHOUT_PAGES = 64, 2**20
"""Tokens of a block, and of all blocks, where the cache has no pages but states alone."""


def block_sizes(layout: CacheLayout, counts: Mapping[str, int]) -> tuple[int, int]:
    """Returns the arguments `block` and `cache_tokens` of a `Router` of such caches.

    Args:
        layout: groups of the cache.
        counts: group name -> pages or states of that group.
    """
    groups = layout.paged_groups
    if not groups:
        return _WITHOUT_PAGES
    held = max(group.page_size * counts[group.name] for group in groups)
    return min(group.page_size for group in groups), held


class Router:
    """Chooses among replicas of one model. Not thread-safe.

    Args:
        replicas: number of replicas.
        block: tokens of a page of their caches; only whole blocks are compared.
        cache_tokens: tokens that the cache of a replica holds.
    """

    def __init__(self, replicas: int, *, block: int, cache_tokens: int) -> None:
        self._block = block
        self._most = max(1, cache_tokens // block)
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._chosen = [0] * replicas
        self._count = 0

    def choose(
        self, ids: Sequence[int], loads: Sequence[int | None], scope: tuple[object, ...] = ()
    ) -> int:
        """Returns the replica for a prompt, and records that it gets the prompt.

        It is the one with the longest prefix of the prompt, less `TOKENS_PER_SEQUENCE` for each open sequence; among
        equals the least loaded, and then the one that was not chosen for the longest time.

        Args:
            ids: token ids of the prompt.
            loads: open sequences of each replica; `None` for one that cannot be chosen.
            scope: what else prompts must have in common to share pages, such as salt and adapter.

        Raises:
            ValueError: no replica can be chosen.
        """
        keys = list(self._keys(ids, scope))
        able = [number for number, load in enumerate(loads) if load is not None]
        if not able:
            raise ValueError("no replica is left")

        def worth(number: int) -> tuple[int, int, int]:
            load = loads[number] or 0
            tokens = self._matched(number, keys) * self._block
            return tokens - TOKENS_PER_SEQUENCE * load, -load, -self._chosen[number]

        chosen = max(able, key=worth)
        self._count += 1
        self._chosen[chosen] = self._count
        self._record(chosen, keys)
        return chosen

    def note(self, replica: int, ids: Sequence[int], scope: tuple[object, ...] = ()) -> None:
        """Records that a replica holds a prefix that came another way, such as from a file."""
        self._record(replica, list(self._keys(ids, scope)))

    def forget(self, replica: int | None = None) -> None:
        """Forgets what a replica holds, or what all do; for caches that were emptied."""
        for held in self._held if replica is None else [self._held[replica]]:
            held.clear()

    def _keys(self, ids: Sequence[int], scope: tuple[object, ...]) -> Iterator[int]:
        """Yields the key of each whole block, which depends on all tokens up to its end."""
        key = hash(scope)
        for begin in range(0, len(ids) - self._block + 1, self._block):
            key = hash((key, *ids[begin : begin + self._block]))
            yield key

    def _matched(self, replica: int, keys: Sequence[int]) -> int:
        """Returns how many of the first blocks a replica holds."""
        held = self._held[replica]
        return next((count for count, key in enumerate(keys) if key not in held), len(keys))

    def _record(self, replica: int, keys: Sequence[int]) -> None:
        held = self._held[replica]
        # The last block first, so that a prefix is forgotten after what follows it.
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._most:
            held.popitem(last=False)
