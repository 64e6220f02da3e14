"""Integrity checks of the records of pages and states, which an engine makes when no request is left."""

from collections.abc import Callable, Collection

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.errors import CorruptBooks

_MOST_SHARE = 0.01
"""Share of an engine's time that checks may take."""

_ADVICE = (
    "this is a fault of jaxkv, and texts may have been computed from pages of other requests: "
    "discard the results since the last check, make a new LLM and report the fault"
)


def check_books(
    allocator: PageAllocator, prefix: PrefixIndex | None, running: Collection[int]
) -> None:
    """Compares the reference count of every page and state with its holders.

    Args:
        allocator: holds pages and states of all sequences.
        prefix: holds cached pages and checkpoints, and the host tier; `None` if the prefix cache is off.
        running: numbers of the sequences that may hold pages or states.

    Raises:
        CorruptBooks: two records contradict each other, or another sequence holds pages or states; it names the ids.
    """
    try:
        allocator.check()
        if prefix is not None:
            prefix.check()
    except ValueError as error:
        raise CorruptBooks(f"{error}; {_ADVICE}") from error
    leaked = allocator.open_sequences - set(running)
    if leaked:
        raise CorruptBooks(
            f"sequences {sorted(leaked)} hold pages or states and do not run; {_ADVICE}"
        )


class IdleCheck:
    """Checks the records of one idle engine, in at most 1% of its time.

    Sequences that were open before the engine was made belong to other users of the cache and are no leak.

    Args:
        allocator: holds pages and states of all sequences.
        prefix: holds cached pages and checkpoints; `None` if the prefix cache is off.
        clock: returns seconds; must be monotonic.
    """

    def __init__(
        self, allocator: PageAllocator, prefix: PrefixIndex | None, clock: Callable[[], float]
    ) -> None:
        self._allocator = allocator
        self._prefix = prefix
        self._clock = clock
        self._of_others = allocator.open_sequences
        self._due = clock()

    def run_if_due(self) -> bool:
        """Runs a check unless the last one is too recent; returns whether it ran.

        Raises:
            CorruptBooks: see `check_books`.
        """
        began = self._clock()
        if began < self._due:
            return False
        check_books(self._allocator, self._prefix, self._of_others)
        ended = self._clock()
        self._due = ended + (ended - began) / _MOST_SHARE
        return True
