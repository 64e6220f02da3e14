"""Options of attention scores: scale, sliding window and soft cap, as host values."""

from dataclasses import dataclass
from math import e, log2

LOG2_E = log2(e)
"""The kernels compute the softmax with exp2: scores are multiplied by log2(e)."""


@dataclass(frozen=True)
class Options:
    """Operations on scores between the product with the keys and the softmax.

    Attributes:
        scale: factor of the scores.
        window: number of most recent keys that a query sees, itself included; `None` for all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); `None` for no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
