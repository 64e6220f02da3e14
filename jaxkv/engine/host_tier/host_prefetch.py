"""Swap-ins of prefixes from the host for waiting requests, at most one for each.

A request stays in the waiting queue during its swap-in, while running requests continue. It tries one swap-in each time
it waits; afterwards it computes the tokens that it did not get.
"""

from typing import Protocol, runtime_checkable

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.request_state import RequestState
from jaxkv.offload.swap_in import SwapIn, SwapIns


@runtime_checkable
class SwapInTransfer(Protocol):
    """A swap-in whose bytes are moving."""

    swap_in: SwapIn


@runtime_checkable
class Mover[T: SwapInTransfer](Protocol):
    """Moves the bytes of swap-ins; `jaxkv.offload.transfers.HostTransfers` is one."""

    def start(self, swap_in: SwapIn) -> T:
        """Starts the transfers of a swap-in."""
        ...

    def advance(self, inbound: T, *, wait: bool = False) -> bool | None:
        """Continues the transfers; returns whether all are done, or `None` if one failed."""
        ...


class HostPrefetch[T: SwapInTransfer]:
    """Swaps prefixes in for waiting requests.

    Args:
        prefix: the prefix index; a request adopts its prefix from it after the swap-in.
        swap_ins: allocates pages and states for swap-ins.
        mover: moves the bytes.
    """

    def __init__(self, prefix: PrefixIndex, swap_ins: SwapIns, mover: Mover[T]) -> None:
        self._prefix = prefix
        self._swap_ins = swap_ins
        self._mover = mover
        self._in_progress: dict[RequestState, T] = {}

    @property
    def num_in_progress(self) -> int:
        """Number of swap-ins in progress."""
        return len(self._in_progress)

    def start_swap_in(self, sequence: RequestState, most: int | None) -> bool:
        """Starts a swap-in if the host has more of the prefix than the device; returns whether the request must wait.

        Args:
            sequence: a waiting request with its page keys.
            most: most tokens that it may reuse; `None` for no limit.
        """
        if sequence in self._in_progress:
            return True
        keys = sequence.keys
        if sequence.fetched or keys is None or not len(self._swap_ins.tier):
            return False
        tokens = sequence.tokens
        reused = self._prefix.match(tokens, keys, most=most).num_tokens
        limit = self._prefix.limit(tokens, most)
        swap_in = self._swap_ins.start(tokens, keys, limit, reused, sequence.goal)
        if swap_in is None:
            return False
        try:
            self._in_progress[sequence] = self._mover.start(swap_in)
        except BaseException:
            self._swap_ins.release(swap_in)
            raise
        return True

    def advance(self, *, wait: bool = False) -> None:
        """Advances all swap-ins; the prefix index gets the prefixes that have arrived.

        Args:
            wait: block until the next transfer of the oldest swap-in is done.

        Raises:
            CachePoisoned: a write to the cache failed and lost it.
        """
        for sequence, inbound in list(self._in_progress.items()):
            # A failed transfer above may have shut the tier down, which cancels all swap-ins.
            if sequence not in self._in_progress:
                continue
            done = self._mover.advance(inbound, wait=wait)
            wait = False
            if done is False or self._in_progress.pop(sequence, None) is None:
                continue
            sequence.fetched = True
            try:
                if done:
                    self._swap_ins.land(inbound.swap_in)
            finally:
                self._swap_ins.release(inbound.swap_in)

    def cancel(self, sequence: RequestState) -> None:
        """Cancels the swap-in of a request, if there is one."""
        inbound = self._in_progress.pop(sequence, None)
        if inbound is not None:
            self._swap_ins.release(inbound.swap_in)

    def cancel_all(self) -> bool:
        """Cancels all swap-ins and frees their pages; returns False if there were none."""
        cancelled = list(self._in_progress)
        for sequence in cancelled:
            self.cancel(sequence)
        return bool(cancelled)
