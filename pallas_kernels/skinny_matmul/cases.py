"""Shapes on which `skinny_matmul` is tested, measured and tuned. Imports no JAX.

The floor of a real case is the time to read its weight at 4.2 TB/s; an H200 reads 4.3 to 4.57.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `skinny_matmul`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: rows of x.
        inner: size of the contraction.
        out: columns of the result.
        gated: whether the weight also has rows for gates.
        activation: activation of the gates, or without gates of all sums; `None` for none.
        gate_multiplier: factor before the activation.
        has_bias: whether a bias is added.
        has_residual: whether a residual is added.
        result: dtype of the result; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: int
    inner: int
    out: int
    gated: bool = False
    activation: str | None = None
    gate_multiplier: float = 1.0
    has_bias: bool = False
    has_residual: bool = False
    result: str | None = None
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; results have magnitudes around 1."""
        rng = np.random.default_rng(seed)
        weights = self.out * (2 if self.gated else 1)
        weight = normal(rng, (weights, self.inner), "float32") / np.float32(self.inner**0.5)
        bias = normal(rng, (weights,), dtype) if self.has_bias else None
        residual = normal(rng, (self.rows, self.out), dtype) if self.has_residual else None
        x = normal(rng, (self.rows, self.inner), dtype)
        return {
            "weight": weight.astype(x.dtype),
            "x": x,
            "bias": bias,
            "residual": residual,
            "activation": self.activation,
            "gated": self.gated,
            "gate_multiplier": self.gate_multiplier,
            "result": self.result,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of weight, x, residual and result."""
        itemsize = 4 if dtype == "float32" else 2
        weights = self.out * (2 if self.gated else 1)
        numbers = weights * self.inner + self.rows * self.inner
        numbers += self.rows * self.out * (2 if self.has_residual else 1)
        return numbers * itemsize

    def flops(self) -> int:
        """Returns the FLOPs of the product."""
        return 2 * self.rows * self.inner * self.out * (2 if self.gated else 1)


_SMALL = (
    Case("plain", 3, 128, 96, ci=True),
    Case("all-at-the-end", 5, 192, 72, True, "silu", 0.5, True, True, ci=True),
    Case("one-row", 1, 256, 128, has_bias=True, has_residual=True, ci=True),
    Case("wide-result", 9, 64, 64, result="float32", ci=True),
    Case("squared", 2, 64, 80, activation="relu2", ci=True),
    Case("gelu-tanh", 17, 128, 64, True, "gelu_tanh", ci=True),
    Case("erf", 2, 64, 64, activation="gelu", ci=True),
    Case("odd", 2, 60, 50, True, "silu", has_bias=True, ci=True),
    Case("more-rows", 65, 64, 64, has_residual=True, ci=True),
    Case("no-rows", 0, 64, 64, ci=True),
)

# Model -> product of a layer, or the logits -> (size of the contraction, columns).
_MODELS = {
    "0.6b": {
        "qkv": (1024, 4096),
        "o": (2048, 1024),
        "gate-up": (1024, 3072),
        "down": (3072, 1024),
        "logits": (1024, 151936),
    },
    "8b": {
        "qkv": (4096, 6144),
        "o": (4096, 4096),
        "gate-up": (4096, 14336),
        "down": (14336, 4096),
        "logits": (4096, 128256),
    },
    "70b-tp4": {
        "qkv": (8192, 2560),
        "o": (2048, 8192),
        "gate-up": (8192, 7168),
        "down": (7168, 8192),
        "logits": (8192, 32064),
    },
}
_ROWS = (1, 8, 16, 64)


def _of_model(model: str, product: str, rows: int) -> Case:
    inner, out = _MODELS[model][product]
    gated = product == "gate-up"
    return Case(
        f"{model}-{product}-b{rows}",
        rows,
        inner,
        out,
        gated,
        activation="silu" if gated else None,
        has_residual=product in ("o", "down"),
        result="float32" if product == "logits" else None,
    )


CASES = (
    *_SMALL,
    *(
        _of_model(model, product, rows)
        for model, products in _MODELS.items()
        for product in products
        for rows in _ROWS
    ),
)
