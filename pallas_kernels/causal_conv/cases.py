"""Shapes on which `causal_conv` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool


@dataclass(frozen=True)
class Case:
    """One call of `causal_conv`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: the packed rows; without `packed` each has one token, and rows without tokens are padding.
        channels: channels of the convolution.
        d_conv: number of taps.
        beside: numbers of columns of x before and after the channels.
        biased: whether there is a bias.
        activation: activation of the output, or `None`.
        packed: whether rows have bounds (`cu_q_lens`).
        chunk_size: positions at multiples of this get snapshots.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: Rows
    channels: int
    d_conv: int = 4
    beside: tuple[int, int] = (0, 0)
    biased: bool = True
    activation: str | None = "silu"
    packed: bool = True
    chunk_size: int = 16
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        tables, num_states = self.rows.tables(rng, self.chunk_size)
        before, behind = self.beside
        x = normal(rng, (self.rows.tokens, before + self.channels + behind), dtype)
        x[:, :before] = np.nan
        x[:, before + self.channels :] = np.nan
        shape = (self.d_conv - 1, self.channels)
        inputs = {
            "weight": normal(rng, (self.d_conv, self.channels), dtype),
            "bias": normal(rng, (self.channels,), dtype) if self.biased else None,
            "states": nan_filled_pool(rng, tables["read_states"], num_states, shape, dtype),
            "x": self.rows.nan_filled(x),
            **tables,
            "first_channel": before,
            "activation": self.activation,
        }
        del inputs["seq_lens"]
        if not self.packed:
            # Each padding row gets one of the padding tokens.
            del inputs["cu_q_lens"]
        return inputs

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of inputs and outputs, and of the states read and written."""
        states = len(self.rows.lengths) * 2 + len(self.rows.ends(self.chunk_size))
        numbers = 2 * sum(self.rows.lengths) + states * (self.d_conv - 1)
        return numbers * self.channels * np.dtype(dtype).itemsize

    def flops(self) -> int:
        """Returns the FLOPs of the convolution."""
        return 2 * sum(self.rows.lengths) * self.channels * self.d_conv


_CARRIES = Rows((9, 1, 2, 3, 4, 5, 9), (0, 1, 2, 3, 4, 5, 9), padding_tokens=3, snapshots=True)
_RAGGED = Rows((3071, 512, 2049, 1024, 4096, 1536, 2048, 2048), (256, 0, 512, 0, 1024, 768, 0, 256))

CASES = (
    Case("short-rows", Rows((2, 1, 3), (5, 0, 2)), 16, ci=True),
    Case("carries", _CARRIES, 24, beside=(8, 16), ci=True),
    Case(
        "mixed",
        Rows((0, 2, 5, 0, 130), (7, 3, 0, 0, 15), 2, 4, snapshots=True),
        136,
        biased=False,
        ci=True,
    ),
    Case("two-taps", Rows((1, 17, 40), (3, 0, 15), 1, snapshots=True), 40, d_conv=2, ci=True),
    Case(
        "five-taps", Rows((3, 4, 5, 33), (1, 2, 0, 31), 1, 7, snapshots=True), 8, d_conv=5, ci=True
    ),
    Case("bare", Rows((33, 31)), 1032, activation=None, biased=False, ci=True),
    Case("one-token-each", Rows((1,) * 5, (1, 0, 3, 9, 2), 0, 0), 72, packed=False, ci=True),
    Case(
        "decode-padding", Rows((1,) * 3, (4, 0, 2), 2, 2), 136, beside=(8, 8), packed=False, ci=True
    ),
    Case("snapshots-only-rows", Rows((16, 16, 1), (0, 16, 15), snapshots=True), 256, ci=True),
    Case("t16384-c4352", _RAGGED, 4352, chunk_size=256),
    Case("t16384-c10240", _RAGGED, 10240, beside=(8192, 128), chunk_size=256),
    Case("t2048-c4352", Rows((2048,)), 4352, chunk_size=256),
    Case("b1-c4352", Rows((1,), (5,)), 4352, packed=False),
    Case("b64-c4352", Rows((1,) * 64, (5,) * 64), 4352, packed=False),
    Case("b64-c10240", Rows((1,) * 64, (5,) * 64), 10240, beside=(8192, 128), packed=False),
    Case("b256-c4352", Rows((1,) * 256, (5,) * 256), 4352, packed=False),
)
