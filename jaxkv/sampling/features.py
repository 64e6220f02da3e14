"""`Features`: the sampling operations that a step program contains. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
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
        return (
            self.penalties == needed.penalties
            and self.draws >= needed.draws
            and self.filters >= needed.filters
            and self.min_tokens >= needed.min_tokens
            and self.grammar >= needed.grammar
            and self.processors >= needed.processors
            and self.logprobs_modes >= needed.logprobs_modes
            and self.lora >= needed.lora
            and _top(self) >= _top(needed)
        )


def union(several: Sequence[Features]) -> Features:
    """Returns the smallest features that cover all of `several`, which must not be empty."""
    kinds, left = [several[0]], several
    # The rows have few objects in common, and to compare or hash the features of each would take longer.
    while left := [one for one in left if one is not kinds[-1]]:
        kinds.append(left[0])
    return kinds[0] if len(kinds) == 1 else _union_of(frozenset(kinds))


@cache
def _union_of(kinds: frozenset[Features]) -> Features:
    most = max(map(_top, kinds))
    return Features(
        draws=any(one.draws for one in kinds),
        filters=any(one.filters for one in kinds),
        penalties=any(one.penalties for one in kinds),
        min_tokens=any(one.min_tokens for one in kinds),
        grammar=any(one.grammar for one in kinds),
        processors=any(one.processors for one in kinds),
        logprobs=None if most < 0 else most,
        logprobs_modes=any(one.logprobs_modes for one in kinds),
        lora=any(one.lora for one in kinds),
    )


def _top(features: Features) -> int:
    """Returns the number of most likely tokens that are reported; -1 if no log-probabilities are."""
    return -1 if features.logprobs is None else features.logprobs
