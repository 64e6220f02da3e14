"""Host-side accounting of ids with references. Knows nothing about what a page or a state holds."""

from collections import deque
from collections.abc import Sequence, Set

from jaxkv.errors import OutOfPages, OutOfStates

_EXHAUSTED = {"page": OutOfPages, "state": OutOfStates}


class PagePool:
    """Hands out the ids `first .. num_pages - 1` and takes them back when their last reference is released.

    The longest-free id is handed out first, so the order depends on the calls alone. Every mistake raises
    `ValueError` and changes nothing. One holder, the prefix owner, is told apart, because it gives ids up when asked.
    """

    def __init__(self, num_pages: int, first: int = 0, noun: str = "page") -> None:
        if noun not in _EXHAUSTED:
            raise ValueError(f"noun must be one of {list(_EXHAUSTED)}, got {noun!r}")
        if not 0 <= first < num_pages:
            raise ValueError(f"no {noun} is left of {num_pages} when the first is {first}")
        self._first = first
        self._noun = noun
        self._references = [0] * num_pages
        self._free = deque(range(first, num_pages))
        self._kept: set[int] = set()
        self._num_idle = 0

    @property
    def num_total(self) -> int:
        """Ids that can be handed out."""
        return len(self._references) - self._first

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Ids that the prefix owner alone holds."""
        return self._num_idle

    @property
    def kept(self) -> Set[int]:
        """Ids that the prefix owner holds, alone or with others; the pool's own set, not to be changed."""
        return self._kept

    def references(self, page: int) -> int:
        """Returns how many times an id is held; 0 when it is free."""
        self._check_known([page])
        return self._references[page]

    def taken(self) -> dict[int, int]:
        """Returns the number of references of each id that is not free."""
        return {page: count for page, count in enumerate(self._references) if count}

    def take(self, count: int) -> list[int]:
        """Returns `count` ids with one reference each, or raises and takes none.

        Raises:
            OutOfPages: fewer are free (`OutOfStates` for a pool of states).
        """
        if count < 0:
            raise ValueError(f"cannot take {count} {self._noun}s")
        if count > self.num_free:
            raise self.exhausted(count)
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def exhausted(self, count: int, where: str = "") -> OutOfPages | OutOfStates:
        """Returns the error that says `count` ids are more than are free."""
        return _EXHAUSTED[self._noun](
            f"asked for {count} {self._noun}s{where} but only {self.num_free} of {self.num_total} are free; "
            f"release a sequence or give the cache more memory"
        )

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to each id; all must be held by someone."""
        self._check_held(pages, "share")
        for page in pages:
            self._num_idle -= page in self._kept and self._references[page] == 1
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops a reference to each id; returns those that are free now."""
        self._check_held(pages, "release")
        owned = [page for page in pages if page in self._kept and self._references[page] == 1]
        if owned:
            raise ValueError(
                f"cannot release {self._noun}s {owned}: the prefix owner alone holds them"
            )
        for page in pages:
            self._references[page] -= 1
            self._num_idle += page in self._kept and self._references[page] == 1
        freed = [page for page in pages if self._references[page] == 0]
        self._free.extend(freed)
        return freed

    def keep(self, page: int) -> None:
        """Adds the prefix owner's reference to an id that someone holds."""
        if page in self._kept:
            raise ValueError(f"cannot keep {self._noun} {page}: it is kept already")
        self.share([page])
        self._kept.add(page)

    def forget(self, page: int) -> bool:
        """Drops the prefix owner's reference; returns whether the id is free now."""
        if page not in self._kept:
            raise ValueError(f"cannot forget {self._noun} {page}: it is not kept")
        self._kept.remove(page)
        self._num_idle -= self._references[page] == 1
        return bool(self.release([page]))

    def check(self) -> None:
        """Raises `ValueError` with the ids if free ids and references contradict each other."""
        free = set(self._free)
        ids = range(self._first, len(self._references))
        wrong = [page for page in ids if (self._references[page] == 0) != (page in free)]
        negative = [page for page in ids if self._references[page] < 0]
        if wrong or negative or len(free) != len(self._free) or not free <= set(ids):
            raise ValueError(
                f"the pool of {self._noun}s is corrupt: {wrong} are both free and held or neither, "
                f"{negative} have negative references, free ids are {sorted(self._free)}"
            )
        idle = sorted(page for page in self._kept if self._references[page] == 1)
        if len(idle) != self._num_idle or self._kept & free:
            raise ValueError(
                f"the pool of {self._noun}s is corrupt: the prefix owner alone holds {idle}, "
                f"counted as {self._num_idle}, and keeps {sorted(self._kept & free)} though they are free"
            )

    def _check_known(self, pages: Sequence[int]) -> None:
        unknown = [page for page in pages if not self._first <= page < len(self._references)]
        if unknown:
            raise ValueError(
                f"{self._noun}s {unknown} are not of this pool, which has {self._first} to {len(self._references) - 1}"
            )

    def _check_held(self, pages: Sequence[int], verb: str) -> None:
        self._check_known(pages)
        if len(set(pages)) != len(pages):
            twice = sorted({page for page in pages if list(pages).count(page) > 1})
            raise ValueError(f"cannot {verb} {self._noun}s {twice} twice in one call")
        free = [page for page in pages if self._references[page] == 0]
        if free:
            raise ValueError(f"cannot {verb} {self._noun}s {free}: they are free already")


def state_pool(num_states: int) -> PagePool:
    """Returns a pool of state ids; 0, the permanent zero state, is never handed out."""
    return PagePool(num_states, first=1, noun="state")
