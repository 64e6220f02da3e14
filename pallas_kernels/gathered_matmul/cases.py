"""Shapes on which `gathered_matmul` is tested and measured. Imports no JAX.

The floor of a real case is the time to read the matrices of all choices at 4.2 TB/s.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `gathered_matmul`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: rows of choices.
        count: matrices that each chooses.
        groups: number of matrices.
        inner: size of the contraction.
        out: columns of the result.
        group_axis: axis of the weight that counts its matrices.
        summed: whether x has a row for each choice, and the result is a weighted sum over a row's choices.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: int
    count: int
    groups: int
    inner: int
    out: int
    group_axis: int = 0
    summed: bool = False
    ci: bool = False

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Shape of the weight."""
        lead = (self.groups, self.out) if self.group_axis == 0 else (self.out, self.groups)
        return (*lead, self.inner)

    @property
    def rows_of_x(self) -> int:
        """Rows of x."""
        return self.rows * (self.count if self.summed else 1)

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; results have magnitudes around 1."""
        rng = np.random.default_rng(seed)
        x = normal(rng, (self.rows_of_x, self.inner), dtype)
        weight = normal(rng, self.weight_shape, "float32") / np.float32(self.inner**0.5)
        chosen = rng.permuted(np.tile(np.arange(self.groups), (self.rows, 1)), axis=1)
        weights = rng.dirichlet(np.ones(self.count), self.rows).astype(np.float32)
        return {
            "weight": weight.astype(x.dtype),
            "x": x,
            "chosen": chosen[:, : self.count].astype(np.int32),
            "weights": weights if self.summed else None,
            "group_axis": self.group_axis,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of the chosen matrices, of x and of the result."""
        itemsize = 4 if dtype == "float32" else 2
        pairs = self.rows * self.count
        numbers = min(pairs, self.groups) * self.out * self.inner + self.rows_of_x * self.inner
        return numbers * itemsize + 4 * (self.rows if self.summed else pairs) * self.out

    def flops(self) -> int:
        """Returns the FLOPs of the products."""
        return 2 * self.rows * self.count * self.inner * self.out


# (experts, experts per token, the model's width, an expert's inner size). "up" has two products, gate and up.
_MODELS = {
    "qwen3-next": (512, 10, 2048, 512),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss": (32, 4, 2880, 2880),
}


def _of_model(model: str, part: str, tokens: int) -> Case:
    groups, top_k, width, size = _MODELS[model]
    name = f"{model}-{part}-t{tokens}"
    if part == "up":
        return Case(name, tokens, top_k, groups, width, 2 * size)
    return Case(name, tokens, top_k, groups, size, width, 1, summed=True)


CASES = (
    Case("two-rows", 2, 3, 5, 128, 96, ci=True),
    Case("strided", 6, 1, 4, 64, 72, group_axis=1, ci=True),
    Case("summed", 3, 3, 5, 64, 36, group_axis=1, summed=True, ci=True),
    Case("odd", 2, 2, 3, 60, 50, ci=True),
    Case("long-rows", 1, 2, 3, 2880, 24, ci=True),
    Case("one-column", 3, 2, 4, 64, 1, ci=True),
    Case("no-rows", 0, 2, 3, 64, 64, ci=True),
    *(
        _of_model(model, part, tokens)
        for model in _MODELS
        for part in ("up", "down")
        for tokens in (1, 4)
    ),
)
