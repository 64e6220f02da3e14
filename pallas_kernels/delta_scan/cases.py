"""Shapes on which `delta_scan` is tested and measured. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.delta_layer import DeltaShape
from pallas_kernels.inputs.nan_filled_states import Rows

_QWEN3_NEXT = DeltaShape(16, 32, 128, 128)


@dataclass(frozen=True)
class Case:
    """One call of `delta_scan`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: the packed rows.
        shape: sizes of the layer; those of Qwen3-Next by default.
        chunk_size: tokens of a chunk.
        state_dtype: dtype of the pool; `None` for the call's dtype.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: Rows
    shape: DeltaShape = _QWEN3_NEXT
    chunk_size: int = 64
    state_dtype: str | None = "float32"
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        tables, num_states = self.rows.tables(rng, self.chunk_size)
        stored = self.state_dtype or dtype
        arrays = self.shape.arrays(
            rng, self.rows, tables["read_states"], num_states, dtype=dtype, stored=stored
        )
        return arrays | tables | {"chunk_size": self.chunk_size}

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of inputs and outputs, and of the states read and written."""
        states = len(self.rows.lengths) * 2 + len(self.rows.ends(self.chunk_size))
        stored = np.dtype(self.state_dtype or dtype).itemsize
        tokens = sum(self.rows.lengths) * self.shape.token_numbers * np.dtype(dtype).itemsize
        return tokens + states * self.shape.state_numbers * stored

    def flops(self) -> int:
        """Returns the FLOPs of the recurrence itself."""
        return 7 * sum(self.rows.lengths) * self.shape.state_numbers


_RAGGED = Rows((3071, 512, 2049, 1024, 4096, 1536, 2048, 2048), (256, 0, 512, 0, 1024, 768, 0, 256))
# Lengths 1, chunk - 1, chunk, chunk + 1 and 2 * chunk + 17, from positions in a chunk.
_CHUNKS = Rows((1, 15, 16, 17, 49, 0, 30), (0, 3, 16, 0, 15, 4, 17), 2, 5, snapshots=True)
_CHUNKS_64 = Rows((1, 63, 64, 65, 145, 0, 90), (0, 3, 64, 0, 63, 4, 1), 1, 6, snapshots=True)

CASES = (
    Case("chunks", _CHUNKS, DeltaShape(2, 4, 8, 6), chunk_size=16, ci=True),
    Case("rounded", Rows((21, 9), (0, 31)), DeltaShape(3, 3, 16, 8), 32, state_dtype=None, ci=True),
    Case("chunks-64", _CHUNKS_64, DeltaShape(1, 2, 128, 128), ci=True),
    Case("narrow", Rows((70, 3), (0, 130), 1), DeltaShape(2, 2, 64, 64), 128, ci=True),
    Case("shared-keys", Rows((65,), (5,)), DeltaShape(1, 3, 128, 64), ci=True),
    Case("only-padding", Rows((0, 0), (0, 9), 1, 8), DeltaShape(1, 2, 128, 128), ci=True),
    Case("channels", _CHUNKS, DeltaShape(2, 4, 8, 6, 8), chunk_size=16, ci=True),
    Case("channels-64", _CHUNKS_64, DeltaShape(2, 2, 32, 16, 32), ci=True),
    Case("t16384", _RAGGED),
    Case(
        "t16384-snapshots",
        Rows(_RAGGED.lengths, _RAGGED.positions, snapshots=True),
        chunk_size=1024,
    ),
    Case("t16384-equal", Rows((2048,) * 8, (256,) * 8)),
    Case("t8192-one-row", Rows((8192,))),
    Case("t2048-one-row", Rows((2048,))),
    Case("t2048-kimi-linear", Rows((2048,)), DeltaShape(32, 32, 128, 128, 128)),
)
