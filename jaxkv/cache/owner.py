"""The owner of the cache's arrays between steps. It records whether a failed step has deleted them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache, init_cache
from jaxkv.errors import CacheLeased, CachePoisoned
from jaxkv.memory import named_exhaustion
from pallas_kernels.peer_sum.api import Mailboxes, make_mailboxes


class CacheOwner:
    """Holds the only reference to the cache between steps, because a step deletes the buffers that are donated to it.

    Args:
        layout: the groups.
        counts: group name -> number of pages or states.
        device: where the arrays are, see `init_cache`.
        mailboxes: whether the devices of a mesh have mailboxes for sums over them (`Cache.peers`).

    Attributes:
        announce: called with "rebuild" or "close" before the cache is replaced or freed; `None` for nothing.

    Raises:
        ValueError: `counts` does not fit the layout, see `init_cache`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        counts: Mapping[str, int],
        *,
        device: jax.Device | Sharding | Mesh | None = None,  # pyright: ignore[reportInvalidTypeForm]
        mailboxes: bool = False,
    ) -> None:
        self.layout = layout
        self.counts = dict(counts)
        self._device = device
        self._epoch = 0
        self._rebuilds = 0
        self._kinds = [
            ((array.layer, array.role), array.shape, array.dtype) for array in layout.arrays(counts)
        ]
        self._accepted: tuple[tuple, list] = ((), [])
        """Keys and abstract values of the last cache that passed the comparison with `_kinds`."""
        self._cache: Cache | None = None
        self._has_mailboxes = mailboxes
        self._mailboxes: Mailboxes | None = None
        self._lost = ""
        self._cause: BaseException | None = None
        self._borrower = ""
        self._recall: Callable[[], None] | None = None
        self._observers: list[Callable[[], None]] = []
        self.announce: Callable[[str], None] | None = None
        self.rebuild()

    @property
    def epoch(self) -> int:
        """Number of times that new buffers became the cache."""
        return self._epoch

    @property
    def rebuilds(self) -> int:
        """Number of calls of `rebuild`; the cached tokens of sequences that began before the last one are lost."""
        return self._rebuilds

    @property
    def poisoned(self) -> bool:
        """Whether the cache is lost; then only `rebuild` makes the owner usable."""
        return bool(self._lost)

    @property
    def borrower(self) -> str:
        """The `borrower` given to `take`; empty if the cache is not borrowed, or the borrower returns it on recall."""
        return "" if self._recall is not None else self._borrower

    @property
    def cause(self) -> BaseException | None:
        """The error that lost the cache; `None` if it is not lost or no error was involved."""
        return self._cause if self._lost else None

    def before_donation(self, observer: Callable[[], None]) -> Callable[[], None]:
        """Registers an observer, which is called before each use that may overwrite the cache.

        Returns:
            A function that removes the observer.
        """
        self._observers.append(observer)

        def end() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return end

    def announce_donation(self) -> None:
        """Calls the observers, as `run` and `take` do before they hand the cache out."""
        for observer in tuple(self._observers):
            observer()

    def run(self, step: Callable[..., tuple[Cache, Any]], *args: Any) -> Any:  # noqa: ANN401 - the step's own types
        """Calls `cache, out = step(cache, *args)`, keeps the cache and returns `out`. The step may donate the cache.

        An error of a step that left the buffers alive is raised unchanged, and the cache is kept.

        Raises:
            CachePoisoned: this step failed after the donation (its error is the cause), or the cache was lost before.
            CacheLeased: the cache is borrowed.
        """
        cache = self._live_after_announcing()
        try:
            self._cache = None
            successor, out = step(cache, *args)
            self.put(successor)
        except BaseException as error:
            if self._cache is not None:
                raise
            if not any(array.is_deleted() for array in cache.arrays):
                self._cache = cache
                raise
            self.poison(f"a step failed after donating it: {error!r}", cause=error)
            if isinstance(error, Exception):
                raise self._loss() from error
            raise
        return out

    def handle(self) -> "Handle":
        """Returns a reference to the current cache, valid until the next step.

        Raises:
            CachePoisoned: the cache is lost.
            CacheLeased: the cache is borrowed.
        """
        self._live()
        return Handle(self, self._epoch)

    def take(self, *, borrower: str = "") -> Cache:
        """Hands out the cache. Until `put`, `rebuild` or `poison`, any other use raises `CachePoisoned`.

        Args:
            borrower: the holder's name and the place of the call, for a holder that keeps the cache for longer than
                this call. Any other use then raises `CacheLeased`, which names it.
        """
        cache = self._live_after_announcing()
        self._cache = None
        self._borrower = borrower
        return cache

    def put(self, cache: Cache) -> None:
        """Accepts the successor of the cache that `take` handed out.

        Raises:
            ValueError: nothing was taken, or keys, shapes, dtypes or order of the arrays differ from the layout's.
        """
        if self._cache is not None or self._lost:
            raise ValueError(
                "put() without take(): the cache was not handed out, or it was lost; call take() first"
            )
        # The outputs of one compiled program have the same abstract values at each call, so this comparison is cheap.
        given = (cache.keys, [array.aval for array in cache.arrays])
        if given != self._accepted:
            if _kinds(cache) != self._kinds:
                raise ValueError(
                    f"the step returned the arrays {_kinds(cache)}, wanted {self._kinds}"
                )
            self._accepted = given
        if self._mailboxes is not None and cache.peers is None:
            raise ValueError("the step returned the cache without its `peers`")
        self._cache = cache
        self._borrower = ""
        self._recall = None
        self._epoch += 1

    def lend_until_asked(self, recall: Callable[[], None] | None) -> None:
        """Lets a borrower keep the cache until another use of the owner needs it.

        Args:
            recall: called before that use; it calls `put`, or drops a cache that is lost. `None` if the borrower cannot
                return the cache now.
        """
        self._recall = recall

    def poison(self, reason: str, *, cause: BaseException | None = None) -> None:
        """Marks the cache as lost, for instance when reading a step's results raises."""
        self._cache = None
        self._borrower = ""
        self._lost = reason
        self._cause = cause
        self._ask_back()

    def close(self) -> None:
        """Deletes the cache's buffers at once, also if other objects refer to them; `rebuild` makes a new cache."""
        if self.announce is not None:
            self.announce("close")
        self._ask_back()
        cache = self._cache
        self.poison("it was freed")
        self._mailboxes = None
        for array in () if cache is None else cache.arrays:
            array.delete()

    def rebuild(self) -> None:
        """Replaces the cache, lost or not, by one filled with zeros. The old buffers are dropped first."""
        if self.announce is not None:
            self.announce("rebuild")
        self._ask_back()
        # `poison` also drops the previous cause, whose traceback may hold buffers. If the allocation fails, the cache
        # stays lost for this reason.
        self.poison("there was no memory for a new one, or making it was interrupted")
        num_bytes = sum(array.nbytes for array in self.layout.arrays(self.counts))
        with named_exhaustion(f"making a cache of {num_bytes:,} bytes"):
            cache = init_cache(self.layout, self.counts, device=self._device)
            if self._has_mailboxes:
                assert isinstance(self._device, Mesh), "mailboxes are those of several devices"
                # Sums of a step that failed may be counted on some devices only, so new ones count from the start.
                self._mailboxes = make_mailboxes(self._device)
                cache = replace(cache, peers=self._mailboxes.peers)
        self._cache = cache
        self._lost = ""
        self._epoch += 1
        self._rebuilds += 1

    def _ask_back(self) -> None:
        recall, self._recall = self._recall, None
        if recall is not None:
            recall()

    def _live_after_announcing(self) -> Cache:
        cache = self._live()
        if self._observers:
            self.announce_donation()
            cache = self._live()
        return cache

    def _live(self) -> Cache:
        self._ask_back()
        if self._borrower:
            raise CacheLeased(
                f"the cache is leased to {self._borrower}; commit that lease (or release it, if it only reads) before "
                f"any other code steps, reads or donates the cache"
            )
        if self._cache is None:
            raise self._loss() from self._cause
        return self._cache

    def _loss(self) -> CachePoisoned:
        reason = self._lost or "it was taken and not put back"
        return CachePoisoned(
            f"the cache cannot be used: {reason}. Call rebuild() for an empty one, "
            f"then compute the sequences in flight again"
        )


def _kinds(cache: Cache) -> list[tuple]:
    """Returns key, shape and dtype name of each array of a cache."""
    return [
        (key, array.shape, str(array.dtype))
        for key, array in zip(cache.keys, cache.arrays, strict=True)
    ]


@dataclass(frozen=True)
class Handle:
    """A reference to the cache of one epoch, for reading between two steps."""

    owner: CacheOwner
    epoch: int

    @property
    def cache(self) -> Cache:
        """The cache; do not donate it.

        Raises:
            CachePoisoned: a step has run since, so these buffers were donated, or the cache is lost.
            CacheLeased: the cache is borrowed.
        """
        cache = self.owner._live()
        if self.owner.epoch != self.epoch:
            raise CachePoisoned(
                f"this handle is of epoch {self.epoch} but the cache is at epoch {self.owner.epoch}: its buffers "
                f"were donated; ask the owner for a new handle"
            )
        return cache
