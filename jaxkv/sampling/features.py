"""`Features`: the sampling operations that a step program contains. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache


@dataclass(frozen=True, order=True)
class Features:
    """The sampling operations of a program. A batch runs in the smallest program that covers all its rows.

    Attributes:
        draws: random sampling; without it every row is greedy.
        filters: top-k, top-p and min-p.
        penalties: penalties and logit biases; the cache must hold the token counts.
        min_tokens: masking of stop ids.
        grammar: masking of the tokens that a grammar forbids.
        processors: the registered logits processors; the cache must hold the token histories.
        logprobs: `None` reports no log-probabilities; n reports the sampled token's and those of the n most likely
            tokens.
        logprobs_modes: log-probabilities of each row's own `logprobs_mode`; without it, those of the raw logits.
        lora: low-rank adapters, whose factors the program takes beside the parameters.
    """

    draws: bool = False
    filters: bool = False
    penalties: bool = False
    min_tokens: bool = False
    grammar: bool = False
    processors: bool = False
    logprobs: int | None = None
    logprobs_modes: bool = False
    lora: bool = False

    @property
    def needs_admission(self) -> bool:
        """Whether the entry of a new row in the cache's sampling group must be initialised."""
        return self.penalties or self.processors

    def covers(self, needed: "Features") -> bool:
        """Returns whether a program with these features can run rows that need `needed`.

        Penalties must be equal, because rows without penalties have no cleared counts in the cache's sampling group.
        """
        return self.penalties == needed.penalties and all(
            _level(getattr(self, one.name)) >= _level(getattr(needed, one.name))
            for one in fields(self)
        )


def union(several: Sequence[Features]) -> Features:
    """Returns the smallest features that cover all of `several`, which must not be empty."""
    kinds, left = [], several
    # The rows have few objects in common, and to compare or hash the features of each would take longer.
    while left:
        kind = left[0]
        kinds.append(kind)
        left = [one for one in left if one is not kind]
    return kinds[0] if len(kinds) == 1 else _union_of(frozenset(kinds))


@cache
def _union_of(kinds: frozenset[Features]) -> Features:
    levels = {
        one.name: max((getattr(kind, one.name) for kind in kinds), key=_level)
        for one in fields(Features)
    }
    return Features(**levels)


def _level(feature: bool | int | None) -> int:
    """Returns how much of a feature a program has: 0 or 1, or the number of most likely tokens; -1 for `None`."""
    return -1 if feature is None else int(feature)
