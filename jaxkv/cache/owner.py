"""Holds the one live cache of a program, and knows when its buffers are gone. Knows nothing of what steps do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache, init_cache
from jaxkv.errors import CacheLeased, CachePoisoned
from jaxkv.memory import named_exhaustion


class CacheOwner:
    """The one place that refers to the cache between steps, since a step deletes the buffers it is given.

    Args:
        layout: the groups.
        counts: pages or states of each group, by name.
        device: where the arrays live; `None` for JAX's default device.
    """

    def __init__(
        self,
        layout: CacheLayout,
        counts: Mapping[str, int],
        *,
        device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
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
        """Keys and abstract values of the cache that was last found to be of these kinds."""
        self._cache: Cache | None = None
        self._lost = ""
        self._cause: BaseException | None = None
        self._borrower = ""
        self._recall: Callable[[], None] | None = None
        self.rebuild()

    @property
    def epoch(self) -> int:
        """Grows by one whenever other buffers become the cache."""
        return self._epoch

    @property
    def rebuilds(self) -> int:
        """Grows by one at each `rebuild`: sequences begun before the last one have lost what they remembered."""
        return self._rebuilds

    @property
    def poisoned(self) -> bool:
        """Whether the cache is lost, so that `rebuild` is the only way on."""
        return bool(self._lost)

    @property
    def borrower(self) -> str:
        """Who has borrowed the cache, as said to `take`; empty when nobody has, or gives it back when asked."""
        return "" if self._recall is not None else self._borrower

    @property
    def cause(self) -> BaseException | None:
        """The error that cost the cache, while it is lost and if there was one."""
        return self._cause if self._lost else None

    def run(self, step: Callable[..., tuple[Cache, Any]], *args: Any) -> Any:  # noqa: ANN401 - the step's own types
        """Calls `cache, out = step(cache, *args)`, keeps the cache and returns `out`. The step may donate the cache.

        Raises:
            CachePoisoned: the cache is lost: by this step, which failed after the donation (its error is the cause),
                or earlier. An error of a step that left the buffers alive passes through, and the cache is kept.
        """
        cache = self._live()
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
        """Returns a reference to the cache as it is now, good until the next step."""
        self._live()
        return Handle(self, self._epoch)

    def take(self, *, borrower: str = "") -> Cache:
        """Hands the cache out; until `put`, `rebuild` or `poison`, any other use raises `CachePoisoned`.

        Args:
            borrower: who keeps it for longer than a call, and where it was taken; any other use then raises
                `CacheLeased`, which names it.
        """
        cache = self._live()
        self._cache = None
        self._borrower = borrower
        return cache

    def put(self, cache: Cache) -> None:
        """Accepts the successor of the cache that was taken.

        Raises:
            ValueError: nothing was taken, or the successor's arrays are others, or in another order.
        """
        if self._cache is not None or self._lost:
            raise ValueError("put() without take(): the cache was not handed out, or it was lost")
        # A program's outputs keep their abstract values from call to call, so this costs no look at shapes and dtypes.
        given = (cache.keys, [array.aval for array in cache.arrays])
        if given != self._accepted:
            if _kinds(cache) != self._kinds:
                raise ValueError(
                    f"the step returned the arrays {_kinds(cache)}, wanted {self._kinds}"
                )
            self._accepted = given
        self._cache = cache
        self._borrower = ""
        self._recall = None
        self._epoch += 1

    def lend_until_asked(self, recall: Callable[[], None] | None) -> None:
        """Lets a borrower keep the cache until somebody else uses it.

        Args:
            recall: called then, before anything else; it calls `put`, or drops a cache that is lost. `None` for a
                borrower that goes on with its work.
        """
        self._recall = recall

    def poison(self, reason: str, *, cause: BaseException | None = None) -> None:
        """Declares the cache lost, for instance when reading a step's results shows that the step failed."""
        self._cache = None
        self._borrower = ""
        self._lost = reason
        self._cause = cause
        self._ask_back()

    def close(self) -> None:
        """Frees the cache at once, whoever refers to its arrays; `rebuild` makes another."""
        self._ask_back()
        cache = self._cache
        self.poison("it was freed")
        for array in () if cache is None else cache.arrays:
            array.delete()

    def rebuild(self) -> None:
        """Replaces the cache, lost or not, by one full of zeros. Old buffers are dropped first."""
        self._ask_back()
        # A cause's traceback may hold buffers too. If there is no room, the cache stays lost and says why.
        self.poison("there was no memory for a new one, or making it was interrupted")
        num_bytes = sum(array.nbytes for array in self.layout.arrays(self.counts))
        with named_exhaustion(f"making a cache of {num_bytes:,} bytes"):
            self._cache = init_cache(self.layout, self.counts, device=self._device)
        self._lost = ""
        self._epoch += 1
        self._rebuilds += 1

    def _ask_back(self) -> None:
        recall, self._recall = self._recall, None
        if recall is not None:
            recall()

    def _live(self) -> Cache:
        self._ask_back()
        if self._borrower:
            raise CacheLeased(
                f"the cache is leased to {self._borrower}; commit that lease (or give back what it only reads) before "
                f"anyone else steps, reads or donates the cache"
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
    """Says which arrays a cache has, and of what shape and type."""
    return [
        (key, array.shape, str(array.dtype))
        for key, array in zip(cache.keys, cache.arrays, strict=True)
    ]


@dataclass(frozen=True)
class Handle:
    """A reference to the cache of one epoch, for those who read it between steps."""

    owner: CacheOwner
    epoch: int

    @property
    def cache(self) -> Cache:
        """The cache; do not donate it.

        Raises:
            CachePoisoned: a step has run since, so these buffers were donated, or the cache is lost.
        """
        cache = self.owner._live()
        if self.owner.epoch != self.epoch:
            raise CachePoisoned(
                f"this handle is of epoch {self.epoch} but the cache is at {self.owner.epoch}; "
                f"its buffers were donated, ask the owner for a new handle"
            )
        return cache
