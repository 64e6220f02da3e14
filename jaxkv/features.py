"""What a step program can do when it chooses tokens. Knows no arrays, so that bookkeeping on the host may read it."""

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
