"""`Store`: the pool of pages and states that a `JaxkvCache` and its forks share.

Combines the owner of the arrays, the allocator, the prefix index and the lease. Independent of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import CacheLayout
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from torch_bridge.sharing.dlpack import jax_device
from torch_bridge.sharing.kept_lease import KeptLease
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.fingerprint import Fingerprint, autocast

_ENDS = CheckpointPolicy(
    divergence=False, last_aligned=False, penultimate=False, wait_for_equals=False
)
"""Torch's models leave their states after the last token of a forward alone."""


class Store:
    """One pool of pages and states, with its allocator and prefix index.

    Args:
        layout: the groups of layers.
        counts: number of pages or states of each group, by name.
        device: torch's device.
        keeps_states: whether the prefix index may keep states, if there are any.

    Attributes:
        owner: owner of the JAX arrays.
        allocator: assigns pages and states to sequences.
        index: prefix index of full pages and checkpoints of states, which outlive their sequences.
        num_bytes: size of all arrays.
        device: torch's device.
        autocast: autocast at the last `notice`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        counts: dict[str, int],
        device: torch.device,
        *,
        keeps_states: bool = True,
    ) -> None:
        self.layout = layout
        self.owner = CacheOwner(layout, counts, device=jax_device(device))
        self.allocator = PageAllocator(layout, counts)
        # A row reads one state and writes another at most; what rows leave free keeps checkpoints.
        room = min(((counts[group.name] - 1) // 2 for group in layout.state_groups), default=0)
        self.index = PrefixIndex(
            layout, self.allocator, checkpoints=room if keeps_states else 0, policy=_ENDS
        )
        self.num_bytes = sum(array.nbytes for array in layout.arrays(counts))
        self.device = device
        self._kept = KeptLease(self.owner)
        self._numbers = count()
        self._session: Lease | None = None
        self._in_session = False
        self._fingerprint: Fingerprint | None = None
        self.autocast = autocast()

    @property
    def leases_taken(self) -> int:
        """How often the pool was leased to torch."""
        return self._kept.num_taken

    def new_number(self) -> int:
        """Returns a new sequence id."""
        return next(self._numbers)

    def notice(self, fingerprint: Fingerprint) -> bool:
        """Clears the prefix index if the model's fingerprint differs from the last one; returns whether it does."""
        differs = self._fingerprint is not None and fingerprint != self._fingerprint
        if differs:
            self.index.clear()
        self._fingerprint, self.autocast = fingerprint, autocast()
        return differs

    def borrow(self) -> Lease:
        """Returns a write lease for one forward; pass it to `give_back`, or abandon it."""
        if not self._in_session:
            return self._kept.borrow()
        if self._session is None or not self._session.is_open:
            # A forward failed and the cache was rebuilt.
            self._session = self._kept.borrow()
        return self._session

    def give_back(self, lease: Lease) -> None:
        """Ends a forward's use of the lease: JAX may take the pool from now on, unless a session is open."""
        if not self._in_session:
            self._kept.put_down(lease)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Holds one lease over all forwards inside, so that JAX cannot use the pool."""
        if self._in_session:
            raise ValueError("a session is open already; leave it before the next one")
        self._session = self._kept.borrow()
        self._in_session = True
        try:
            yield
        finally:
            lease, self._session, self._in_session = self._session, None, False
            # A failed forward has ended the lease; the next use of the cache raises.
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
