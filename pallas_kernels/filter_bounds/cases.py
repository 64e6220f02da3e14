"""Shapes on which `filter_bounds` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `filter_bounds`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: number of rows of logits.
        vocab: logits per row.
        top_k: values of the rows, repeated cyclically.
        top_p: values of the rows, repeated cyclically.
        min_p: values of the rows, repeated cyclically.
        spread: standard deviation of the logits.
        kind: "normal"; "ties", few different values; "masked", most are -inf; or "heavy", some are far above the rest.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: int
    vocab: int
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    min_p: tuple[float, ...] = (0.0,)
    spread: float = 2.0
    kind: str = "normal"
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays in float32 and int32; `dtype` is ignored."""
        rng = np.random.default_rng(seed)
        logits = self.spread * normal(rng, (self.rows, self.vocab), "float32")
        if self.kind == "ties":
            logits = np.round(logits)
        elif self.kind == "masked":
            logits[:, self.vocab // 9 :] = -np.inf
        elif self.kind == "heavy":
            logits = np.sign(logits) * np.square(logits)
        options = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        made = {
            name: np.resize(
                np.array(values, np.int32 if name == "top_k" else np.float32), self.rows
            )
            for name, values in options.items()
        }
        temperature = np.resize(np.array([1.0, 0.6, 1.7], np.float32), self.rows)
        return {"logits": logits.astype(np.float32), **made, "temperature": temperature}

    def bytes_moved(self, dtype: str = "float32") -> int:
        """Returns the bytes of the logits, read once."""
        return 4 * self.rows * self.vocab

    def flops(self) -> int:
        """Returns one operation (a comparison) per logit."""
        return self.rows * self.vocab


_K, _P, _M = (0, 50, 1, 700, 4), (0.9, 1.0, 0.5, 0.97), (0.0, 0.0, 0.1)
LLAMA = 128256

CASES = (
    Case("mixed", 12, 4096, _K, _P, _M, ci=True),
    Case("ties", 6, 2052, _K, _P, kind="ties", ci=True),
    Case("masked", 6, 4096, _K, _P, kind="masked", ci=True),
    Case("heavy", 6, 4096, _K, _P, kind="heavy", ci=True),
    Case("flat", 4, 8192, (0, 5000), (0.99, 0.999, 0.0), spread=0.1, ci=True),
    Case("odd", 3, 131, (0, 7), (0.8,), ci=True),
    Case("b1", 1, LLAMA, (50,), (0.9,)),
    Case("b64-k50", 64, LLAMA, (50,)),
    Case("b64-p", 64, LLAMA, (0,), (0.9,), spread=4.0),
    Case("b64-k20-p", 64, LLAMA, (20,), (0.8,)),
    Case("b64-flat-p", 64, LLAMA, (0,), (0.9,), spread=1.0),
    Case("b64-mixed", 64, LLAMA, _K, _P, _M),
    Case("b256-152k", 256, 151936, (20,), (0.95,)),
)
