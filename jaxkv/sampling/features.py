"""What a step program can do when it chooses tokens. Imports no JAX, so that host bookkeeping can use it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Features:
    """What a program can do when it chooses tokens; a batch runs in the smallest program that serves all its rows.

    Attributes:
        draws: rows may have a temperature above 0 (otherwise every row is greedy).
        filters: rows may use top-k, top-p or min-p.
        penalties: rows may use penalties or a logit bias; the cache must hold their counts.
        min_tokens: rows may block their stop ids.
        logprobs: `None` reports none, n the chosen token's and those of the n most likely.
    """

    draws: bool = False
    filters: bool = False
    penalties: bool = False
    min_tokens: bool = False
    logprobs: int | None = None

    def covers(self, needed: "Features") -> bool:
        """Returns whether a program of these features can run rows that need others.

        Penalties must match: rows without them would need clean entries in the cache's sampling group.
        """
        return (
            self.penalties == needed.penalties
            and self.draws >= needed.draws
            and self.filters >= needed.filters
            and self.min_tokens >= needed.min_tokens
            and _top(self) >= _top(needed)
        )


def union(several: Sequence[Features]) -> Features:
    """Returns the least features that serve all of these, of which there is at least one."""
    first = several[0]
    if several.count(first) == len(several):
        return first
    kinds = set(several)
    most = max(map(_top, kinds))
    return Features(
        draws=any(one.draws for one in kinds),
        filters=any(one.filters for one in kinds),
        penalties=any(one.penalties for one in kinds),
        min_tokens=any(one.min_tokens for one in kinds),
        logprobs=None if most < 0 else most,
    )


def _top(features: Features) -> int:
    """Returns the number of most likely tokens that are reported; -1 if not even the chosen one is."""
    return -1 if features.logprobs is None else features.logprobs
