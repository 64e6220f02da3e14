"""A lease that torch keeps from forward to forward, until anybody else uses the cache.

A lease costs two programs and an exchange of every array. Where JAX does nothing between two forwards, nothing needs
to be exchanged; where it does, its first use of the cache commits the lease.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial

import torch

from jaxkv.cache.owner import CacheOwner
from torch_bridge.errors import LeaseLeaked
from torch_bridge.sharing.leases import Lease


class KeptLease:
    """Lends one cache to one forward at a time.

    Args:
        owner: of the cache.

    Attributes:
        num_taken: how often the cache was lent anew.
    """

    def __init__(self, owner: CacheOwner) -> None:
        self.num_taken = 0
        self._owner = owner
        self._lease: Lease | None = None
        self._storages: list[int] = []
        self._uses: list[tuple[int, int]] = []
        self._rests = False
        self._written: torch.cuda.Event | None = None

    def borrow(self) -> Lease:
        """Returns a write lease: the one of before, if nobody else has used the cache since. It goes to `put_down`.

        Torch's current stream may be another one than before; it is ordered after what was written then.

        Raises:
            CacheLeased: another lease is out.
            CachePoisoned: the cache is lost.
            LeaseLeaked: somebody holds a view of a buffer already.
        """
        if self._lease is not None and self._rests:
            if self._uses:
                self._wake(self._lease)
                return self._lease
            self.give_back()
        self._lease = None
        lease = Lease(self._owner, write=True)
        self.num_taken += 1
        self._lease = lease
        self._storages = [view.untyped_storage()._cdata for view in lease.values()]
        self._uses = self._count_uses(lease)
        return lease

    def put_down(self, lease: Lease) -> None:
        """Keeps a lease until the next forward, or until the cache is used by others. The host waits for nothing.

        Raises:
            LeaseLeaked: as `Lease.commit`, which could then not be called later. The lease stays open.
            CachePoisoned: the cache was replaced or lost while it was leased.
        """
        known = lease is self._lease and lease.is_current
        if known and self._count_uses(lease) == self._uses:
            self._rest(lease)
            return
        self._lease = None
        # Which finds out what is wrong, if anything is.
        lease.commit()

    def give_back(self) -> None:
        """Commits what is kept, if anything is."""
        lease = self._lease
        if lease is None or not self._rests:
            return
        self._wake(lease)
        if not lease.is_current:
            # The cache was declared lost.
            lease.abandon("was overtaken")
            return
        try:
            lease.commit()
        except LeaseLeaked:
            # It has no views any more. The next who asks tries again.
            self._uses = []
            if lease.is_open:
                self._rest(lease)
            raise

    def _rest(self, lease: Lease) -> None:
        if lease.device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(lease.device))
        self._rests = True
        # The owner may outlive this object, which ends its lease by itself.
        self._owner.lend_until_asked(partial(_give_back, weakref.ref(self)))

    def _wake(self, lease: Lease) -> None:
        self._rests = False
        self._owner.lend_until_asked(None)
        if self._written is not None:
            torch.cuda.current_stream(lease.device).wait_event(self._written)
            self._written = None

    def _count_uses(self, lease: Lease) -> list[tuple[int, int]]:
        """Returns how many refer to each view and to its memory: more than at first if anybody keeps one."""
        return [
            (sys.getrefcount(view), torch._C._storage_Use_Count(storage))
            for view, storage in zip(lease.values(), self._storages, strict=True)
        ]

    # Bound here, since names of modules may be gone when Python ends.
    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._rests and not is_ending():
            self.give_back()


def _give_back(kept: weakref.ref[KeptLease]) -> None:
    this = kept()
    if this is not None:
        this.give_back()
