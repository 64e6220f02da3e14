"""Samples of one prompt: the first computes it, and the others start from its pages of it. Touches no arrays.

Whose follower a sequence is, `Sequence.leader` says. An interrupt may leave it in a leader's list beyond that.
"""

from bisect import insort
from collections.abc import Callable

from jaxkv.cache.accounts import Accounts
from jaxkv.engine.sequence import ORDER, RUNNING, WAITING, Sequence


class Siblings:
    """Starts followers, within the lists of one scheduler.

    Args:
        accounts: hold the pages.
        waiting, running: the scheduler's own lists, in order.
        release: gives back what a sequence holds, if it holds anything.
    """

    def __init__(
        self,
        accounts: Accounts,
        waiting: list[Sequence],
        running: list[Sequence],
        release: Callable[[Sequence], None],
    ) -> None:
        self._accounts = accounts
        self._waiting = waiting
        self._running = running
        self._release = release

    def start(self, max_rows: int) -> None:
        """Starts the followers of prompts whose last token is all that is left to compute, as far as there are rows."""
        for leader in [one for one in self._running if one.followers and not one.remaining]:
            leader.followers = self._followers(leader)
            while leader.followers and len(self._running) < max_rows:
                self._fork(leader, leader.followers[0])
            self.let_go(leader)

    def let_go(self, leader: Sequence) -> None:
        """Makes the first of a leader's followers, if there are any, wait for itself and lead the others."""
        followers = self._followers(leader)
        if followers:
            first, *others = followers
            first.followers += [one for one in others if one not in first.followers]
            for follower in others:
                follower.leader = first
            if first not in self._waiting:
                insort(self._waiting, first, key=ORDER)
            first.leader = None
        leader.followers = []

    def _fork(self, leader: Sequence, follower: Sequence) -> None:
        """Starts one follower from the leader's pages, or leaves it a follower."""
        try:
            self._accounts.fork(leader.number, follower.number)
            follower.computed = follower.collected = leader.computed
            follower.reserved = follower.writable = leader.computed
            follower.shared, follower.cached = leader.computed, 0
            follower.keys = leader.keys and leader.keys.copy()
            follower.admitted = leader.admitted
            follower.status = RUNNING
            insort(self._running, follower, key=ORDER)
            leader.followers.remove(follower)
            follower.leader = None
        except BaseException:
            self._undo(leader, follower)
            raise

    def _undo(self, leader: Sequence, follower: Sequence) -> None:
        self._release(follower)
        if follower in self._running:
            self._running.remove(follower)
        follower.restart()
        follower.cached, follower.shared, follower.keys, follower.admitted = None, 0, None, None
        follower.status, follower.leader = WAITING, leader
        if follower not in leader.followers:
            leader.followers.insert(0, follower)

    def _followers(self, leader: Sequence) -> list[Sequence]:
        """Returns who still follows a leader, and does not lead, wait or run by now."""
        return [
            one
            for one in leader.followers
            if one.leader is leader and one.status == WAITING and one not in self._waiting
        ]
