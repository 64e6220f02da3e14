"""The pages and states that a `JaxkvCache` and its forks share: who owns them, who holds them, who has borrowed them.

Knows no model and no text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch

from jaxkv.cache.accounts import Accounts, PageCopy
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.spec import CacheLayout
from torch_bridge.dlpack import jax_device
from torch_bridge.kept_lease import KeptLease
from torch_bridge.leases import Lease


class Store:
    """One pool of pages and states, its books, and its prefix index.

    Args:
        layout: the groups.
        counts: pages or states of each, by name.
        device: where torch computes.

    Attributes:
        owner: of the live cache.
        accounts: which sequence holds what.
        index: full pages that outlive their sequences.
        num_bytes: of all pools.
        device: where torch computes.
    """

    def __init__(self, layout: CacheLayout, counts: dict[str, int], device: torch.device) -> None:
        self.layout = layout
        self.owner = CacheOwner(layout, counts, device=jax_device(device))
        self.accounts = Accounts(layout, counts)
        self.index = PrefixIndex(layout, self.accounts)
        self.num_bytes = sum(array.nbytes for array in layout.arrays(counts))
        self.device = device
        self._kept = KeptLease(self.owner)
        self._numbers = count()
        self._session: Lease | None = None
        self._weights: tuple = ()

    @property
    def leases_taken(self) -> int:
        """How often the pool was lent since the beginning."""
        return self._kept.num_taken

    def new_number(self) -> int:
        """Returns a number that no sequence has had."""
        return next(self._numbers)

    def notice_weights(self, model: torch.nn.Module) -> None:
        """Forgets all prefixes if the model's weights are others than last time, or were written to."""
        weights = tuple(
            (p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()
        )
        if self._weights and weights != self._weights:
            self.index.clear()
        self._weights = weights

    def borrow(self) -> Lease:
        """Returns a write lease for one forward. It goes to `give_back`, or is abandoned."""
        if self._session is not None and self._session.is_open:
            return self._session
        return self._kept.borrow()

    def give_back(self, lease: Lease) -> None:
        """Lets JAX have the pool as soon as it asks, unless a session keeps it."""
        if lease is not self._session:
            self._kept.put_down(lease)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keeps one lease over all forwards inside, and JAX out."""
        if self._session is not None:
            raise ValueError("a session is open already; leave it before the next one")
        kept = self._session = self._kept.borrow()
        try:
            yield
        finally:
            self._session = None
            # A forward that failed has ended it, and the next use of the cache says so.
            if kept.is_open:
                self._kept.put_down(kept)

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
