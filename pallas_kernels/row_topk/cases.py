"""Shapes on which `row_topk` is tested and measured. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `row_topk`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: number of rows.
        columns: numbers of a row.
        count: numbers that are taken.
        has_ties: whether the numbers are few different ones, with zeros of both signs and infinities.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: int
    columns: int
    count: int
    has_ties: bool = False
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
        """Returns the op's arguments by name; the scores are float32, and `dtype` is ignored."""
        rng = np.random.default_rng(seed)
        scores = normal(rng, (self.rows, self.columns), "float32")
        if self.has_ties:
            scores = np.where(scores > 2, np.inf, np.where(scores < -2, -np.inf, np.round(scores)))
        return {"scores": scores.astype(np.float32), "count": self.count}

    def bytes_moved(self, dtype: str = "float32") -> int:
        """Returns the bytes of the scores and of the results."""
        return 4 * self.rows * (self.columns + 2 * self.count)

    def flops(self) -> int:
        """Returns one operation (a comparison) per score."""
        return self.rows * self.columns


CASES = (
    Case("ties", 5, 70, 9, has_ties=True, ci=True),
    Case("whole-rows", 3, 7, 7, ci=True),
    Case("longest", 130, 1024, 32, has_ties=True, ci=True),
    Case("qwen3-next-t1", 1, 512, 10),
    Case("qwen3-next-t8", 8, 512, 10),
    Case("qwen3-next-t64", 64, 512, 10),
    Case("qwen3-next-t2048", 2048, 512, 10),
    Case("deepseek-v3-groups-t64", 512, 32, 2),
)
