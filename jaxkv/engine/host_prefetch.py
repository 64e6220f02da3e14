"""Which sequences wait for a prefix that comes back from the host, one swap-in each. Moves no bytes, knows no arrays.

Such a sequence waits like one for which there is no room yet; those that run go on. It asks once each time it waits:
whatever went wrong, it then computes what it did not get.
"""

from typing import Protocol, runtime_checkable

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.request_state import RequestState
from jaxkv.offload.swap_in import SwapIn, SwapIns


@runtime_checkable
class Inbound(Protocol):
    """A swap-in that somebody moves."""

    swap_in: SwapIn


@runtime_checkable
class Mover[T: Inbound](Protocol):
    """Moves bytes; see `host_transfers`."""

    def begin(self, swap_in: SwapIn) -> T:
        """Begins to bring a prefix back."""
        ...

    def advance(self, inbound: T, *, wait: bool = False) -> bool | None:
        """Goes on; returns whether all is there, `None` if something failed."""
        ...


class HostPrefetch[T: Inbound]:
    """Brings prefixes back for those who wait.

    Args:
        prefix: the index, which gives out what has come.
        swap_ins: places for what comes.
        mover: moves it.
    """

    def __init__(self, prefix: PrefixIndex, swap_ins: SwapIns, mover: Mover[T]) -> None:
        self._prefix = prefix
        self._swap_ins = swap_ins
        self._mover = mover
        self._under_way: dict[RequestState, T] = {}

    @property
    def under_way(self) -> int:
        """Sequences that wait for theirs."""
        return len(self._under_way)

    def holds_back(self, sequence: RequestState, most: int | None) -> bool:
        """Whether a sequence that could begin should wait, since more of its prefix is about to come.

        Args:
            sequence: has its keys.
            most: no more tokens than this could be reused; `None` for no such limit.
        """
        if sequence in self._under_way:
            return True
        keys = sequence.keys
        if sequence.fetched or keys is None or not len(self._swap_ins.tier):
            return False
        tokens = sequence.tokens
        reused = self._prefix.match(tokens, keys, most=most).num_tokens
        limit = self._prefix.limit(tokens, most)
        swap_in = self._swap_ins.begin(tokens, keys, limit, reused, sequence.goal)
        if swap_in is None:
            return False
        try:
            self._under_way[sequence] = self._mover.begin(swap_in)
        except BaseException:
            self._swap_ins.drop(swap_in)
            raise
        return True

    def advance(self, *, wait: bool = False) -> None:
        """Goes on with everything that is under way; what has come can be adopted from now on.

        Args:
            wait: until the next part of the first one has come.

        Raises:
            CachePoisoned: writing it cost the cache.
        """
        for sequence, inbound in list(self._under_way.items()):
            # What was moved before this may have ended the tier, and everything that was under way with it.
            if sequence not in self._under_way:
                continue
            done = self._mover.advance(inbound, wait=wait)
            wait = False
            if done is False or self._under_way.pop(sequence, None) is None:
                continue
            sequence.fetched = True
            try:
                if done:
                    self._swap_ins.land(inbound.swap_in)
            finally:
                self._swap_ins.drop(inbound.swap_in)

    def cancel(self, sequence: RequestState) -> None:
        """Gives up what comes for a sequence, if anything does."""
        inbound = self._under_way.pop(sequence, None)
        if inbound is not None:
            self._swap_ins.drop(inbound.swap_in)

    def give_way(self) -> bool:
        """Gives up everything that is under way, since somebody needs the places now; returns whether there was any."""
        cancelled = list(self._under_way)
        for sequence in cancelled:
            self.cancel(sequence)
        return bool(cancelled)
