"""Shapes on which `delta_update` is tested and measured. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.delta_layer import DeltaShape
from pallas_kernels.inputs.nan_filled_states import Rows


@dataclass(frozen=True)
class Case:
    """One call of `delta_update`.

    Attributes:
        name: the case's name in tests and benchmark records.
        batch: number of rows with a token; every fifth one starts a sequence and reads state 0.
        shape: sizes of the layer; those of Qwen3-Next by default.
        padding_rows: number of additional rows, which write nothing.
        state_dtype: dtype of the pool; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    batch: int
    shape: DeltaShape = DeltaShape(16, 32, 128, 128)
    padding_rows: int = 0
    state_dtype: str | None = "float32"
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        positions = tuple(int(row % 5 != 1) for row in range(self.batch))
        rows = Rows((1,) * self.batch, positions, self.padding_rows, self.padding_rows)
        tables, num_states = rows.tables(rng, 1)
        ids = {name: tables[name] for name in ("read_states", "write_states")}
        stored = self.state_dtype or dtype
        arrays = self.shape.arrays(
            rng, rows, ids["read_states"], num_states, dtype=dtype, stored=stored
        )
        return arrays | ids

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of the states, read and written, and of inputs and outputs."""
        tokens = self.shape.token_numbers * np.dtype(dtype).itemsize
        states = 2 * self.shape.state_numbers * np.dtype(self.state_dtype or dtype).itemsize
        return self.batch * (tokens + states)

    def flops(self) -> int:
        """Returns the FLOPs of the recurrence: a decay, two products with the state and the update by a product."""
        return 7 * self.batch * self.shape.state_numbers


_SMALL = DeltaShape(2, 4, 16, 32)

CASES = (
    Case("shared-keys", 6, _SMALL, padding_rows=2, ci=True),
    Case("rounded", 3, DeltaShape(3, 3, 64, 8), padding_rows=1, state_dtype=None, ci=True),
    Case("one-row", 1, DeltaShape(1, 2, 128, 128), ci=True),
    Case("eight-rows", 2, DeltaShape(1, 3, 8, 32), ci=True),
    Case("wide", 2, DeltaShape(2, 2, 96, 192), ci=True),
    Case("only-padding", 0, _SMALL, padding_rows=2, ci=True),
    Case("channels", 6, DeltaShape(2, 4, 16, 32, 16), padding_rows=2, ci=True),
    Case("b1", 1),
    Case("b8", 8),
    Case("b64", 64),
    Case("b64-kimi-linear", 64, DeltaShape(32, 32, 128, 128, 128)),
    Case("b64-bf16", 64, state_dtype="bfloat16"),
    Case("b256", 256),
    Case("b256-bf16", 256, state_dtype="bfloat16"),
)
