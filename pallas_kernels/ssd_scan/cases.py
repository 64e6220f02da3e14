"""Shapes on which `ssd_scan` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.mamba_layer import STATE_SCALE, activated, layer
from pallas_kernels.inputs.nan_filled_pages import normal
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool


@dataclass(frozen=True)
class Case:
    """One call of `ssd_scan`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: the packed rows.
        heads: heads of x.
        head_dim: components of a head.
        d_state: components of B and C.
        groups: number of distinct B and C.
        chunk_size: tokens of a chunk.
        gated: whether outputs are gated.
        dt_limits: least and greatest step.
        state_dtype: dtype of the pool; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: Rows
    heads: int
    head_dim: int = 64
    d_state: int = 128
    groups: int = 1
    chunk_size: int = 256
    gated: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    state_dtype: str | None = "float32"
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        tables, num_states = self.rows.tables(rng, self.chunk_size)
        d_inner, tokens = self.heads * self.head_dim, self.rows.tokens
        shape = (self.heads, self.head_dim, self.d_state)
        stored = self.state_dtype or dtype
        xbc = activated(rng, (tokens, d_inner + 2 * self.groups * self.d_state), dtype)
        return {
            **layer(rng, self.heads),
            "states": nan_filled_pool(
                rng, tables["read_states"], num_states, shape, stored, STATE_SCALE
            ),
            "xbc": self.rows.nan_filled(xbc),
            "dt": self.rows.nan_filled(normal(rng, (tokens, self.heads), dtype)),
            **tables,
            "chunk_size": self.chunk_size,
            "z": self.rows.nan_filled(normal(rng, (tokens, d_inner), dtype))
            if self.gated
            else None,
            "dt_limits": self.dt_limits,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of inputs and outputs, and of the states read and written."""
        d_inner = self.heads * self.head_dim
        columns = 2 * d_inner + 2 * self.groups * self.d_state + self.heads + self.gated * d_inner
        states = len(self.rows.lengths) * 2 + len(self.rows.ends(self.chunk_size))
        return (
            sum(self.rows.lengths) * columns * np.dtype(dtype).itemsize
            + states * d_inner * self.d_state * np.dtype(self.state_dtype or dtype).itemsize
        )

    def flops(self) -> int:
        """Returns the FLOPs of the recurrence itself."""
        return 6 * sum(self.rows.lengths) * self.heads * self.head_dim * self.d_state


_RAGGED = Rows((3071, 512, 2049, 1024, 4096, 1536, 2048, 2048), (256, 0, 512, 0, 1024, 768, 0, 256))
# Lengths 1, chunk - 1, chunk, chunk + 1 and 2 * chunk + 17 for chunks of 16, from positions in a chunk.
_CHUNKS = Rows((1, 15, 16, 17, 49, 0, 30), (0, 3, 16, 0, 15, 4, 17), 2, 5, snapshots=True)
_CHUNKS_64 = Rows((1, 63, 64, 65, 145, 0, 90), (0, 3, 64, 0, 63, 4, 1), 1, 6, snapshots=True)

CASES = (
    Case("chunks", _CHUNKS, 4, 8, 16, groups=2, chunk_size=16, ci=True),
    Case("one-head", Rows((5, 40), (3, 0)), 1, 4, 8, chunk_size=8, gated=True, ci=True),
    Case(
        "limits",
        Rows((21, 9), (0, 31), snapshots=True),
        6,
        8,
        24,
        groups=3,
        chunk_size=32,
        dt_limits=(0.01, 0.1),
        state_dtype=None,
        ci=True,
    ),
    Case("chunks-64", _CHUNKS_64, 4, 64, 128, groups=2, chunk_size=64, ci=True),
    Case("wide", Rows((70, 3), (0, 130), 1, snapshots=True), 2, 128, 64, chunk_size=128, ci=True),
    Case("large-state", Rows((200,), (5,)), 2, 64, 256, chunk_size=64, gated=True, ci=True),
    Case("only-padding", Rows((0, 0), (0, 9), 1, 8), 2, 64, 128, chunk_size=64, ci=True),
    # 10 and 9 pieces: each stage is filled several times.
    Case("long", Rows((640, 517), (0, 59)), 4, 64, 128, groups=2, chunk_size=64, ci=True),
    Case("t16384-h128-g8", _RAGGED, 128, groups=8),
    Case(
        "t16384-h128-g8-snapshots",
        Rows(_RAGGED.lengths, _RAGGED.positions, snapshots=True),
        128,
        groups=8,
        chunk_size=1024,
    ),
    Case("t16384-h128-g8-equal", Rows((2048,) * 8, (256,) * 8), 128, groups=8),
    Case("t8192-h64-g1", Rows((8192,)), 64),
    Case("t8192-h128-n256", Rows((8192,)), 128, 64, 256),
    Case("t2048-h128-g8", Rows((2048,)), 128, groups=8),
)
