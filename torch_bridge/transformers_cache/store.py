"""The pages and states that a `JaxkvCache` and its forks share: who owns them, who holds them, who has borrowed them.

Knows no model and no text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import CacheLayout
from torch_bridge.sharing.dlpack import jax_device
from torch_bridge.sharing.kept_lease import KeptLease
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.fingerprint import Fingerprint


class Store:
    """One pool of pages and states, its books, and its prefix index.

    Args:
        layout: the groups.
        counts: pages or states of each, by name.
        device: where torch computes.

    Attributes:
        owner: of the live cache.
        allocator: which sequence holds what.
        index: full pages that outlive their sequences.
        num_bytes: of all pools.
        device: where torch computes.
    """

    def __init__(self, layout: CacheLayout, counts: dict[str, int], device: torch.device) -> None:
        self.layout = layout
        self.owner = CacheOwner(layout, counts, device=jax_device(device))
        self.allocator = PageAllocator(layout, counts)
        self.index = PrefixIndex(layout, self.allocator)
        self.num_bytes = sum(array.nbytes for array in layout.arrays(counts))
        self.device = device
        self._kept = KeptLease(self.owner)
        self._numbers = count()
        self._session: Lease | None = None
        self._in_session = False
        self._fingerprint: Fingerprint | None = None

    @property
    def leases_taken(self) -> int:
        """How often the pool was lent since the beginning."""
        return self._kept.num_taken

    def new_number(self) -> int:
        """Returns a number that no sequence has had."""
        return next(self._numbers)

    def notice(self, fingerprint: Fingerprint) -> None:
        """Forgets all prefixes if what computes them is something else than last time."""
        if self._fingerprint is not None and fingerprint != self._fingerprint:
            self.index.clear()
        self._fingerprint = fingerprint

    def borrow(self) -> Lease:
        """Returns a write lease for one forward. It goes to `give_back`, or is abandoned."""
        if not self._in_session:
            return self._kept.borrow()
        if self._session is None or not self._session.is_open:
            # A forward failed and the cache was rebuilt.
            self._session = self._kept.borrow()
        return self._session

    def give_back(self, lease: Lease) -> None:
        """Lets JAX have the pool as soon as it asks, unless a session keeps it."""
        if not self._in_session:
            self._kept.put_down(lease)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keeps one lease over all forwards inside, and JAX out."""
        if self._in_session:
            raise ValueError("a session is open already; leave it before the next one")
        self._session = self._kept.borrow()
        self._in_session = True
        try:
            yield
        finally:
            lease, self._session, self._in_session = self._session, None, False
            # A forward that failed has ended it, and the next use of the cache says so.
            if lease is not None and lease.is_open:
                self._kept.put_down(lease)

    def copy(self, lease: Lease, copies: list[PageCopy]) -> None:
        """Copies pages and states inside a lease; all sources are read before any target is written."""
        for group in self.layout.groups:
            mine = [copy for copy in copies if copy.group == group.name]
            if not mine:
                continue
            sources = torch.tensor([copy.source for copy in mine], device=self.device)
            targets = torch.tensor([copy.target for copy in mine], device=self.device)
            for layer in group.layers:
                for array in group.spec.arrays:
                    view = lease[f"layer{layer}.{array.role}"]
                    view[targets] = view[sources]
