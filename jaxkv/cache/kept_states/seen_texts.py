"""`SeenTexts`: finds the longest prefix that a prompt shares with an earlier one, which is worth a checkpoint."""

from collections import OrderedDict
from collections.abc import Sequence

from jaxkv.cache.kept_pages.keys import PageKeys

_SEEN = 65536
"""Most pages of earlier prompts that are recorded."""

_BRANCHES = 8
"""Most recorded successors of one page."""


class SeenTexts:
    """The pages of earlier prompts, each under the digest of the page before it; the least recently used are dropped.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._after: OrderedDict[bytes, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def shared_tokens(self, keys: PageKeys, tokens: Sequence[int]) -> int:
        """Returns the length of the longest prefix that `tokens` shares with an earlier prompt."""
        size = self._size
        for full in range(len(tokens) // size + 1):
            page = tuple(tokens[full * size : (full + 1) * size])
            successors = self._after.get(keys.parent(tokens, size, full), ())
            most = max((_common(page, other) for other in successors), default=0)
            if most < size:
                return full * size + most
        return len(tokens)

    def add(self, keys: PageKeys, tokens: Sequence[int]) -> None:
        """Records a prompt."""
        size = self._size
        for full in range(-(-len(tokens) // size)):
            parent = keys.parent(tokens, size, full)
            page = tuple(tokens[full * size : (full + 1) * size])
            successors = self._after.setdefault(parent, OrderedDict())
            successors[page] = None
            successors.move_to_end(page)
            self._after.move_to_end(parent)
            if len(successors) > _BRANCHES:
                successors.popitem(last=False)
        while len(self._after) > _SEEN:
            self._after.popitem(last=False)

    def clear(self) -> None:
        """Removes all recorded prompts."""
        self._after.clear()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix of two token lists."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
