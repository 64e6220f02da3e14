"""Measured peak rates of devices, and the lower bounds of times that follow from them."""

import math
from dataclasses import dataclass, field

from pallas_kernels.workbench.timing import (
    ROTATION_BYTES,
    Chain,
    Effort,
    Timing,
    refuse_profilers,
    time_chain,
    time_launches,
)

__all__ = [
    "CEILINGS",
    "ROTATION_BYTES",
    "Ceilings",
    "Chain",
    "Effort",
    "Timing",
    "refuse_profilers",
    "time_chain",
    "time_launches",
]


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device.

    Attributes:
        read: bytes per second of a pure read.
        stream: bytes per second that a kernel which also computes reads (a matrix-vector product).
        matmul: FLOP per second of a large product, by dtype.
    """

    read: float
    stream: float
    matmul: dict[str, float] = field(default_factory=dict)

    def floor_us(self, num_bytes: int, flops: int, dtype: str) -> float:
        """Returns the least time for this work; a dtype whose products were not measured counts bytes alone."""
        matmul = self.matmul.get(dtype, math.inf)
        return max(num_bytes / self.stream, flops / matmul) * 1e6


# Measured on one H200, 2026-11-20. A row that only reads can pass its floor by up to 6%.
CEILINGS = {
    "NVIDIA H200": Ceilings(
        read=4.57e12,
        stream=4.3e12,
        matmul={"bfloat16": 790e12, "float16": 790e12, "float8_e4m3fn": 1330e12},
    )
}
