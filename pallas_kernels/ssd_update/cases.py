"""Shapes on which `ssd_update` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.mamba_layer import STATE_SCALE, activated, layer
from pallas_kernels.inputs.nan_filled_pages import normal
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool


@dataclass(frozen=True)
class Case:
    """One call of `ssd_update`.

    Attributes:
        name: the case's name in tests and benchmark records.
        batch: number of rows with a token; every fifth one starts a sequence and reads state 0.
        heads: heads of x.
        head_dim: components of a head.
        d_state: components of B and C.
        groups: number of distinct B and C.
        padding_rows: number of additional rows, which write nothing.
        gated: whether outputs are gated.
        dt_limits: least and greatest step.
        state_dtype: dtype of the pool; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    batch: int
    heads: int = 128
    head_dim: int = 64
    d_state: int = 128
    groups: int = 8
    padding_rows: int = 0
    gated: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    state_dtype: str | None = "float32"
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        positions = tuple(int(row % 5 != 1) for row in range(self.batch))
        rows = Rows((1,) * self.batch, positions, self.padding_rows, self.padding_rows)
        tables, num_states = rows.tables(rng, 1)
        d_inner = self.heads * self.head_dim
        shape = (self.heads, self.head_dim, self.d_state)
        stored = self.state_dtype or dtype
        xbc = activated(rng, (rows.tokens, d_inner + 2 * self.groups * self.d_state), dtype)
        return {
            **layer(rng, self.heads),
            "states": nan_filled_pool(
                rng, tables["read_states"], num_states, shape, stored, STATE_SCALE
            ),
            "xbc": rows.nan_filled(xbc),
            "dt": rows.nan_filled(normal(rng, (rows.tokens, self.heads), dtype)),
            "read_states": tables["read_states"],
            "write_states": tables["write_states"],
            "z": rows.nan_filled(normal(rng, (rows.tokens, d_inner), dtype))
            if self.gated
            else None,
            "dt_limits": self.dt_limits,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of the states, read and written, and of inputs and outputs."""
        d_inner = self.heads * self.head_dim
        columns = 2 * d_inner + 2 * self.groups * self.d_state + self.heads + self.gated * d_inner
        state = 2 * d_inner * self.d_state * np.dtype(self.state_dtype or dtype).itemsize
        return self.batch * (columns * np.dtype(dtype).itemsize + state)

    def flops(self) -> int:
        """Returns the FLOPs of the recurrence."""
        return 6 * self.batch * self.heads * self.head_dim * self.d_state


CASES = (
    Case("groups", 6, 4, 8, 16, groups=2, padding_rows=2, ci=True),
    Case("gated", 3, 3, 16, 24, groups=3, gated=True, dt_limits=(0.01, 0.05), ci=True),
    Case("one-row", 1, 2, 64, 128, groups=1, ci=True),
    Case("rounded", 3, 2, 64, 128, groups=2, padding_rows=1, state_dtype=None, ci=True),
    Case("wide", 2, 2, 128, 256, groups=1, gated=True, ci=True),
    Case("eighty", 3, 2, 80, 128, groups=1, ci=True),
    Case("narrow", 2, 4, 64, 64, groups=4, ci=True),
    Case("only-padding", 0, 2, 64, 128, groups=1, padding_rows=2, ci=True),
    Case("b1", 1),
    Case("b8", 8),
    Case("b64", 64),
    Case("b64-bf16", 64, state_dtype="bfloat16"),
    Case("b256", 256),
    Case("b256-bf16", 256, state_dtype="bfloat16"),
    Case("b64-n256", 64, 128, 64, 256, groups=1),
)
