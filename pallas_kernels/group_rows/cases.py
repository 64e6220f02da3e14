"""Shapes on which `group_rows` is tested and measured. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `group_rows`.

    Attributes:
        name: the case's name in tests and benchmark records.
        tokens: number of tokens.
        count: groups that each chooses.
        groups: number of groups.
        width: columns of x.
        alike: whether all tokens choose the same groups.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    tokens: int
    count: int
    groups: int
    width: int
    alike: bool = False
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        draws = 1 if self.alike else self.tokens
        chosen = np.stack([rng.permutation(self.groups)[: self.count] for _ in range(draws)])
        return {
            "x": normal(rng, (self.tokens, self.width), dtype),
            "chosen": np.broadcast_to(chosen, (self.tokens, self.count)).astype(np.int32),
            "groups": self.groups,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of x, of the rows, and of the tables."""
        rows = self.tokens * self.count
        of_x = (self.tokens + rows) * self.width * np.dtype(dtype).itemsize
        return of_x + 4 * (3 * rows + self.groups)

    def flops(self) -> int:
        """Returns none: rows are copied."""
        return 0


CASES = (
    Case("two-words", 40, 4, 1000, 40, ci=True),
    Case("alike", 33, 4, 32, 2880, alike=True, ci=True),
    Case("all-groups", 5, 7, 7, 24, ci=True),
    Case("many-groups", 256, 16, 1024, 64, ci=True),
    Case("qwen3-next-t1", 1, 10, 512, 2048),
    Case("qwen3-next-t8", 8, 10, 512, 2048),
    Case("qwen3-next-t64", 64, 10, 512, 2048),
    Case("qwen3-next-t256", 256, 10, 512, 2048),
    Case("qwen3-next-t512", 512, 10, 512, 2048),
    Case("qwen3-30b-a3b-t512", 512, 8, 128, 2048),
    Case("qwen3-30b-a3b-t2048", 2048, 8, 128, 2048),
    Case("qwen3-30b-a3b-t8192", 8192, 8, 128, 2048),
    Case("qwen3-30b-a3b-t2048-alike", 2048, 8, 128, 2048, alike=True),
    Case("deepseek-v2-lite-t512", 512, 6, 64, 2048),
    Case("gpt-oss-20b-t512", 512, 4, 32, 2880),
)
