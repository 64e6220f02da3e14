"""How far a prompt agrees with earlier ones."""

from collections import OrderedDict
from collections.abc import Sequence

from jaxkv.cache.kept_pages.keys import PageKeys

_SEEN = 65536
"""Pages of earlier prompts that are compared with a new one."""

_BRANCHES = 8
"""Pages that are remembered to have followed one page."""


class SeenTexts:
    """The pages of earlier prompts by what they follow, the longest unseen forgotten first. Only names and tokens.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._after: OrderedDict[bytes, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def agreed(self, keys: PageKeys, tokens: Sequence[int]) -> int:
        """Returns how many of its first tokens a text has in common with an earlier one."""
        size = self._size
        for full in range(len(tokens) // size + 1):
            page = tuple(tokens[full * size : (full + 1) * size])
            followers = self._after.get(keys.parent(tokens, size, full), ())
            most = max((_common(page, other) for other in followers), default=0)
            if most < size:
                return full * size + most
        return len(tokens)

    def note(self, keys: PageKeys, tokens: Sequence[int]) -> None:
        """Remembers a text."""
        size = self._size
        for full in range(-(-len(tokens) // size)):
            parent = keys.parent(tokens, size, full)
            page = tuple(tokens[full * size : (full + 1) * size])
            followers = self._after.setdefault(parent, OrderedDict())
            followers[page] = None
            followers.move_to_end(page)
            self._after.move_to_end(parent)
            if len(followers) > _BRANCHES:
                followers.popitem(last=False)
        while len(self._after) > _SEEN:
            self._after.popitem(last=False)

    def clear(self) -> None:
        """Forgets all."""
        self._after.clear()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many of their first tokens two stretches share."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
