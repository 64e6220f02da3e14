"""A lease that is kept between forwards and committed only when JAX uses the cache.

A lease costs two programs and an exchange of every array. If JAX does not use the cache between two forwards, the
second forward reuses the lease. If it does, its first use commits the lease.
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
    """Leases one cache to one forward at a time.

    Args:
        owner: the cache's owner.

    Attributes:
        num_taken: number of new leases.
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
        """Returns a write lease, to be passed to `put_down`; the kept one if the cache was not used since.

        Torch's current stream may differ from the previous one; it is ordered after the previous writes.

        Raises:
            CacheLeased: the cache is leased already.
            CachePoisoned: the cache is lost.
            LeaseLeaked: a view of a buffer exists already.
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
        """Keeps a lease until the next forward, or until JAX uses the cache. The host does not wait.

        Raises:
            LeaseLeaked: a view is still referenced elsewhere, as in `Lease.commit`. The lease stays open.
            CachePoisoned: the cache was replaced or lost while it was leased.
        """
        known = lease is self._lease and lease.is_current
        if known and self._count_uses(lease) == self._uses:
            self._rest(lease)
            return
        self._lease = None
        # `commit` checks the lease and raises the appropriate error.
        lease.commit()

    def give_back(self) -> None:
        """Commits the kept lease, if there is one."""
        lease = self._lease
        if lease is None or not self._rests:
            return
        self._wake(lease)
        if not lease.is_current:
            # The cache was declared lost meanwhile.
            lease.abandon("was overtaken")
            return
        try:
            lease.commit()
        except LeaseLeaked:
            # The lease has dropped its views. The next use of the cache tries to commit it again.
            self._uses = []
            if lease.is_open:
                self._rest(lease)
            raise

    def _rest(self, lease: Lease) -> None:
        if lease.device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(lease.device))
        self._rests = True
        # A weak reference: the owner may outlive this object, which ends its lease in `__del__`.
        self._owner.lend_until_asked(partial(_give_back, weakref.ref(self)))

    def _wake(self, lease: Lease) -> None:
        self._rests = False
        self._owner.lend_until_asked(None)
        if self._written is not None:
            torch.cuda.current_stream(lease.device).wait_event(self._written)
            self._written = None

    def _count_uses(self, lease: Lease) -> list[tuple[int, int]]:
        """Returns the reference counts of each view and of its storage; they grow if a view is kept elsewhere."""
        return [
            (sys.getrefcount(view), torch._C._storage_Use_Count(storage))
            for view, storage in zip(lease.values(), self._storages, strict=True)
        ]

    # Bound as a default, since module globals may be cleared at interpreter exit.
    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._rests and not is_ending():
            self.give_back()


def _give_back(kept: weakref.ref[KeptLease]) -> None:
    this = kept()
    if this is not None:
        this.give_back()
