"""Short forms of values and lists for one-line error messages."""

from collections.abc import Collection
from itertools import islice

MOST_LISTED = 6


def clip(text: object, limit: int = 160) -> str:
    """Returns `text` on one line and no longer than `limit`."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def shown(value: object) -> str:
    """Returns a value as Python writes it, in at most 80 characters."""
    return clip(repr(value), 80)


def listed(items: Collection[object], *, separator: str = ", ", most: int = MOST_LISTED) -> str:
    """Returns the first few of some items, each clipped, and how many more there are."""
    first = separator.join(clip(item) for item in islice(items, most))
    more = len(items) - most
    return first if more <= 0 else f"{first}{separator}and {more:,} more"
