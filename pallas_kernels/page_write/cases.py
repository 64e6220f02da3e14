"""Shapes on which `page_write` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `page_write`; the defaults are those of Llama-3.1-8B.

    Attributes:
        name: the case's name in tests and benchmark records.
        tokens: number of tokens that are written, each at a random slot.
        pages: pages of each pool.
        page_size: tokens per page.
        shape: shape of one token's entry in each pool.
        pools: number of pools that share slots.
        padding_tokens: number of additional tokens that write nothing, at random positions among the others.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    tokens: int
    pages: int
    page_size: int = 16
    shape: tuple[int, ...] = (8, 128)
    pools: int = 2
    padding_tokens: int = 0
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays."""
        rng = np.random.default_rng(seed)
        num_slots = self.pages * self.page_size
        slots = np.concatenate(
            [
                rng.choice(num_slots, self.tokens, replace=False),
                num_slots + np.arange(self.padding_tokens),
            ]
        ).astype(np.int32)
        pool_shape = (self.pages, self.page_size, *self.shape)
        return {
            "pages": tuple(normal(rng, pool_shape, dtype) for _ in range(self.pools)),
            "values": tuple(
                normal(rng, (len(slots), *self.shape), dtype) for _ in range(self.pools)
            ),
            "slots": rng.permutation(slots),
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the bytes of the values, read once and written once."""
        return 2 * self.pools * self.tokens * int(np.prod(self.shape)) * np.dtype(dtype).itemsize

    def flops(self) -> int:
        """Returns 0: a write has no arithmetic."""
        return 0


CASES = (
    Case("kv-1-1-8-1", 1, 1, 8, (1, 1), ci=True),
    Case("kv-1-8-32-32", 5, 1, 32, (8, 32), ci=True),
    Case("kv-8-8-64-32", 8, 8, 64, (8, 32), padding_tokens=3, ci=True),
    Case("kv-1-2-2304-128", 40, 1, 2304, (2, 128), padding_tokens=1, ci=True),
    Case("kv-8-16-64-128", 64, 8, 64, (16, 128), padding_tokens=64, ci=True),
    Case("latent", 17, 9, 16, (576,), pools=1, padding_tokens=5, ci=True),
    Case("scalars", 6, 4, 4, (), pools=1, padding_tokens=2, ci=True),
    Case("every-slot", 12, 3, 4, (2, 8), ci=True),
    Case("only-padding", 0, 3, 4, (2, 8), padding_tokens=7, ci=True),
    Case("llama-decode-64", 64, 16384),
    Case("llama-prefill-8192", 8192, 16384),
    Case("llama-prefill-8192-page64", 8192, 4096, 64),
)
