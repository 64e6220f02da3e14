"""One sequence's part in a step, as the host decided it. Knows no arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.batch import Features
from jaxkv.config import MAX_LOGPROBS, SamplingParams

LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)
"""How many of the most likely tokens programs report."""

STOP_WIDTH = 72
"""Stop ids a request may carry: `MAX_STOP_IDS` of its own and a few of the model's."""


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step, as the host decided it.

    Attributes:
        sequence: its number in the accounts, which hold its pages and states.
        tokens: the new token ids; one, of any value, if `carry`.
        start: position of the first of them.
        params: the request's sampling parameters, with `seed` settled.
        seed: 64-bit seed of this sample.
        emits: the step's token for this row counts (the last chunk of a prompt, or a decode step).
        carry: the new token is the one this row sampled last, read on the device.
        generated: tokens generated before this step.
        max_tokens: most tokens this row may still generate; read by `loop` programs.
        stop_ids: ids that end the row.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    params: SamplingParams
    seed: int = 0
    emits: bool = True
    carry: bool = False
    generated: int = 0
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()


def features_of(rows: Sequence[Row]) -> Features:
    """Returns the least a program must be able to do to serve these rows."""
    params = [row.params for row in rows]
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    # Few sizes, so that few programs serve all wishes; who asked for less gets less.
    top = next((size for size in LOGPROB_SIZES if size >= max(logprobs, default=0)), None)
    return Features(
        draws=any(p.temperature > 0 for p in params),
        filters=any(p.uses_filters for p in params),
        penalties=any(p.uses_penalties or p.logit_bias for p in params),
        min_tokens=any(p.min_tokens > 0 for p in params),
        logprobs=top if logprobs else None,
    )


def split_seed(seed: int) -> tuple[int, int]:
    """Splits a 64-bit seed into two numbers an int32 can hold."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return tuple(half - 2**32 if half >= 2**31 else half for half in (low, high))  # type: ignore[return-value]
