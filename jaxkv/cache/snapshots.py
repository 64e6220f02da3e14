"""States that steps keep on their way, from when a step is told of them until they are checkpoints or given up.

Knows ids and sequences; which of them are worth keeping, it is told.
"""

from jaxkv.cache.accounts import Accounts
from jaxkv.cache.spec import CacheLayout


class Snapshots:
    """The books of snapshots in flight: each is held by the sequence whose step writes it, and freed with it.

    Args:
        layout: the groups.
        accounts: the books of the same groups.
    """

    def __init__(self, layout: CacheLayout, accounts: Accounts) -> None:
        self._accounts = accounts
        self._pools = {g.name: accounts.pool_of(g.name) for g in layout.state_groups}

    def in_flight(self, seqs: list[int]) -> int:
        """Returns how many snapshots these sequences hold."""
        return sum(len(held.snapshots) for held in self._accounts.held(seqs))

    def take(self, seq: int, num_tokens: int) -> dict[str, int] | None:
        """Takes a state of every recurrent group for what a sequence is after `num_tokens`; `None` if one lacks any.

        Raises:
            ValueError: the sequence has a snapshot of this length already.
        """
        (held,) = self._accounts.held([seq])
        if num_tokens in held.snapshots:
            raise ValueError(f"sequence {seq} has a snapshot after {num_tokens} tokens already")
        if not all(pool.num_free for pool in self._pools.values()):
            return None
        states = {name: pool.take(1)[0] for name, pool in self._pools.items()}
        held.snapshots[num_tokens] = states
        return states

    def drop(self, seq: int, num_tokens: int) -> None:
        """Gives a snapshot up."""
        (held,) = self._accounts.held([seq])
        for name, state in held.snapshots.pop(num_tokens).items():
            self._pools[name].release([state])

    def keep(self, seq: int, num_tokens: int) -> dict[str, int]:
        """Passes a snapshot from its sequence to the keeper, and returns its states."""
        (held,) = self._accounts.held([seq])
        states = held.snapshots.pop(num_tokens)
        for name, state in states.items():
            self._pools[name].keep(state)
            self._pools[name].release([state])
        return states

    def keep_live(self, seq: int) -> dict[str, int] | None:
        """Lets the keeper hold the states that a sequence has come to; `None` if there are none, or it has them."""
        (held,) = self._accounts.held([seq])
        states = {name: held.states[name].read for name in self._pools}
        if any(not state or state in self._pools[name].kept for name, state in states.items()):
            return None
        for name, state in states.items():
            self._pools[name].keep(state)
        return states
