"""Shapes on which `grouped_matmul` is tested and measured. Imports no JAX.

The floor of a real case is the longer of two times: reading the weights of all groups with rows at 4.2 TB/s, and its
products at 800 TFLOP/s.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `grouped_matmul`.

    Attributes:
        name: the case's name in tests and benchmark records.
        sizes: number of rows of each group.
        inner: size of the contraction.
        out: columns of the result.
        group_axis: axis of the weight that counts its matrices.
        result: dtype of the result; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    sizes: tuple[int, ...]
    inner: int
    out: int
    group_axis: int = 0
    result: str | None = None
    ci: bool = False

    @property
    def rows(self) -> int:
        """Number of rows of x."""
        return sum(self.sizes)

    @property
    def groups(self) -> int:
        """Number of matrices of the weight."""
        return len(self.sizes)

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """Shape of the weight."""
        lead = (self.groups, self.out) if self.group_axis == 0 else (self.out, self.groups)
        return (*lead, self.inner)

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; results have magnitudes around 1."""
        rng = np.random.default_rng(seed)
        x = normal(rng, (self.rows, self.inner), dtype)
        weight = normal(rng, self.weight_shape, "float32") / np.float32(self.inner**0.5)
        return {
            "weight": weight.astype(x.dtype),
            "x": x,
            "group_sizes": np.array(self.sizes, np.int32),
            "group_axis": self.group_axis,
            "result": self.result,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of x, the result and the weights of groups with rows."""
        itemsize = 4 if dtype == "float32" else 2
        asked = sum(size > 0 for size in self.sizes)
        numbers = asked * self.out * self.inner + self.rows * (self.inner + self.out)
        return numbers * itemsize

    def flops(self) -> int:
        """Returns the FLOPs of the products."""
        return 2 * self.rows * self.inner * self.out


def drawn_sizes(tokens: int, groups: int, top_k: int, seed: int = 0) -> tuple[int, ...]:
    """Returns the groups' sizes when each token is routed to `top_k` different groups at random."""
    rng = np.random.default_rng(seed)
    asked = np.argsort(rng.random((tokens, groups)), axis=1)[:, :top_k]
    return tuple(int(size) for size in np.bincount(asked.reshape(-1), minlength=groups))


_SMALL = (
    Case("ragged", (3, 0, 1, 5, 20, 0), 128, 128, ci=True),
    Case("strided", (9, 0, 8, 7), 64, 72, group_axis=1, ci=True),
    Case("wide-result", (1, 0, 0, 2), 64, 64, result="float32", ci=True),
    Case("all-in-one", (0, 0, 40, 0), 64, 136, ci=True),
    Case("first-and-last", (1, 0, 0, 0, 0, 0, 0, 1), 128, 64, group_axis=1, ci=True),
    Case("one-group", (7,), 64, 64, ci=True),
    Case("long", (130, 0, 1, 125), 64, 192, ci=True),
    Case("odd", (2, 3), 60, 50, ci=True),
    Case("no-rows", (0, 0), 64, 64, ci=True),
)

# Sizes around those of windows, for the narrow and the wide shape.
_EDGES = (128, 127, 129, 1, 0, 255, 8, 7, 9, 0, 0, 120, 16, 15, 17, 64)
_HOSTILE = (
    Case("edges", _EDGES, 512, 576),
    Case("edges-strided", _EDGES, 576, 520, group_axis=1),
    Case("narrow-edges", (*(0,) * 48, *_EDGES[6:], *(1,) * 48), 512, 576, group_axis=1),
    Case("singles", (1,) * 64, 512, 576),
    Case("all-in-one-of-many", (*(0,) * 40, 300, *(0,) * 23), 512, 576),
)

# (experts, experts per token, the model's width, an expert's inner size). "up" has two products, gate and up.
_MODELS = {
    "granite-4-tiny": (64, 6, 1536, 512),
    "qwen3-next": (512, 10, 2048, 512),
    "gpt-oss": (32, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
}
_TOKENS = (1, 8, 64, 256, 2048)


def _of_model(model: str, part: str, tokens: int) -> Case:
    groups, top_k, width, size = _MODELS[model]
    inner, out, axis = (width, 2 * size, 0) if part == "up" else (size, width, 1)
    sizes = drawn_sizes(tokens, groups, top_k)
    return Case(f"{model}-{part}-t{tokens}", sizes, inner, out, axis)


CASES = (
    *_SMALL,
    *_HOSTILE,
    *(
        _of_model(model, part, tokens)
        for model in _MODELS
        for part in ("up", "down")
        for tokens in _TOKENS
    ),
)
