"""A pool of page or state ids with reference counts, on the host."""

from collections import deque
from collections.abc import Sequence, Set

from jaxkv.errors import OutOfPages, OutOfStates

_EXHAUSTED = {"page": OutOfPages, "state": OutOfStates}


class PagePool:
    """Reference counts of the ids `first` to `num_pages - 1`. An id is free when it has no reference.

    The id that has been free longest is taken first, so the order is deterministic. A wrong call raises `ValueError`
    and changes nothing. References of the prefix owner are recorded apart, because it releases them on request.

    Args:
        num_pages: one more than the last id.
        first: the first id.
        noun: "page" or "state", for messages and the type of error.

    Raises:
        ValueError: an unknown noun, or no ids.
    """

    def __init__(self, num_pages: int, first: int = 0, noun: str = "page") -> None:
        if noun not in _EXHAUSTED:
            raise ValueError(f"noun must be one of {list(_EXHAUSTED)}, got {noun!r}")
        if not 0 <= first < num_pages:
            raise ValueError(
                f"a pool needs 0 <= first < num_pages, got {first} and {num_pages} {noun}s"
            )
        self._first = first
        self._noun = noun
        self._references = [0] * num_pages
        self._free = deque(range(first, num_pages))
        self._kept: set[int] = set()
        self._num_idle = 0

    @property
    def num_total(self) -> int:
        """Number of ids, free or not."""
        return len(self._references) - self._first

    @property
    def num_free(self) -> int:
        """Number of ids without a reference."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of ids that only the prefix owner holds."""
        return self._num_idle

    @property
    def kept(self) -> Set[int]:
        """Ids that the prefix owner holds, alone or with sequences; do not change this set."""
        return self._kept

    def references(self, page: int) -> int:
        """Returns the number of references to an id; 0 if it is free."""
        if not self._first <= page < len(self._references):
            self._check_known([page])  # Raises: it is not in this pool.
        return self._references[page]

    def counts(self) -> list[int]:
        """Returns the number of references to each id from 0 on, in a list of the caller's own."""
        return self._references.copy()

    def taken(self) -> dict[int, int]:
        """Returns id -> number of references, for ids that are not free."""
        return {page: count for page, count in enumerate(self._references) if count}

    def take(self, count: int) -> list[int]:
        """Returns `count` free ids, with one reference each, or raises and takes none.

        Raises:
            OutOfPages: fewer ids are free (`OutOfStates` for a pool of states).
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"cannot take {count} {self._noun}s; ask for at least 0")
        if count > self.num_free:
            raise self.exhausted(count)
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def exhausted(self, count: int, where: str = "") -> OutOfPages | OutOfStates:
        """Returns the error for a request of `count` ids when fewer are free; `where` is part of the message."""
        return _EXHAUSTED[self._noun](
            f"asked for {count} {self._noun}s{where} but only {self.num_free} of {self.num_total} are free; "
            f"release a sequence or give the cache more memory"
        )

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to each id; none may be free."""
        self._check_held(pages, "share")
        for page in pages:
            self._num_idle -= page in self._kept and self._references[page] == 1
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops a reference to each id; returns the ids that are free now."""
        self._check_held(pages, "release")
        owned = [page for page in pages if page in self._kept and self._references[page] == 1]
        if owned:
            raise ValueError(
                f"cannot release {self._noun}s {owned}: only the prefix owner holds them; use release_kept()"
            )
        for page in pages:
            self._references[page] -= 1
            self._num_idle += page in self._kept and self._references[page] == 1
        freed = [page for page in pages if self._references[page] == 0]
        self._free.extend(freed)
        return freed

    def keep(self, page: int) -> None:
        """Adds the prefix owner's reference to an id that is not free."""
        if page in self._kept:
            raise ValueError(f"cannot keep {self._noun} {page}: the prefix owner holds it already")
        self._check_held([page], "share")
        self._references[page] += 1
        self._kept.add(page)

    def release_kept(self, page: int) -> bool:
        """Drops the prefix owner's reference to an id; returns whether the id is free now."""
        if page not in self._kept:
            raise ValueError(
                f"cannot release {self._noun} {page}: the prefix owner does not hold it"
            )
        self._kept.remove(page)
        self._references[page] -= 1
        if self._references[page]:
            return False
        self._num_idle -= 1
        self._free.append(page)
        return True

    def check(self) -> None:
        """Raises `ValueError` with the ids if the free list and the reference counts contradict each other."""
        free = set(self._free)
        ids = range(self._first, len(self._references))
        wrong = [page for page in ids if (self._references[page] == 0) != (page in free)]
        negative = [page for page in ids if self._references[page] < 0]
        if wrong or negative or len(free) != len(self._free) or not free <= set(ids):
            raise ValueError(
                f"the pool of {self._noun}s is corrupt: {wrong} are both free and referenced, or neither, "
                f"{negative} have negative references, free ids are {sorted(self._free)}"
            )
        idle = sorted(page for page in self._kept if self._references[page] == 1)
        if len(idle) != self._num_idle or self._kept & free:
            raise ValueError(
                f"the pool of {self._noun}s is corrupt: only the prefix owner holds {idle}, "
                f"counted as {self._num_idle}, and it holds {sorted(self._kept & free)} although they are free"
            )

    def _check_known(self, pages: Sequence[int]) -> None:
        unknown = [page for page in pages if not self._first <= page < len(self._references)]
        if unknown:
            raise ValueError(
                f"{self._noun}s {unknown} are not in this pool, which has {self._first} to {len(self._references) - 1}"
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
    """Returns a pool of state ids from 1 on; id 0 is the zero state."""
    return PagePool(num_states, first=1, noun="state")
