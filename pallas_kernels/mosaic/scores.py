"""What the attention kernels make of scores between the product with the keys and the softmax. Traces nothing."""

from dataclasses import dataclass
from math import e, log2

LOG2_E = log2(e)
"""The kernels' softmax counts in powers of two."""


@dataclass(frozen=True)
class Options:
    """What the scores become between the product with the keys and the softmax."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
