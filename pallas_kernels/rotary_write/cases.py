"""Shapes on which `rotary_write` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Case:
    """One call of `rotary_write`; the defaults are those of Llama-3.1-8B.

    Attributes:
        name: the case's name in tests and benchmark records.
        tokens: number of tokens that are written, each at a random slot.
        pages: pages of each pool.
        page_size: tokens per page.
        heads: query heads.
        kv_heads: key heads.
        head_dim: components of a head.
        half: number of rotated pairs of components.
        norm: whether queries and keys are normalised.
        value_norm: whether values are normalised.
        quantised: 8-bit dtype of the pools; `None` for the call's dtype.
        padding_tokens: number of additional tokens that write nothing, at random positions among the others.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    tokens: int
    pages: int
    page_size: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    half: int = 64
    norm: bool = False
    quantised: str | None = None
    padding_tokens: int = 0
    value_norm: bool = False
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
        angles = rng.uniform(-np.pi, np.pi, (len(slots), self.half))
        shape = (len(slots), self.heads + 2 * self.kv_heads, self.head_dim)
        return {
            "pages": self._pages(rng, dtype),
            "qkv": normal(rng, shape, dtype),
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
            "slots": rng.permutation(slots),
            "norm": normal(rng, (2, self.head_dim), dtype) if self.norm else None,
        } | ({"value_norm": True} if self.value_norm else {})

    def _pages(self, rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, ...]:
        shape = (self.pages, self.page_size, self.kv_heads, self.head_dim)
        stored = self.quantised or dtype
        pools = [normal(rng, shape, stored) for _ in "kv"]
        pools += [normal(rng, shape[:3], "float32") for _ in "kv" if self.quantised]
        return tuple(pools)

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the minimum traffic in bytes: heads and angles read, queries and rows of the pools written, once."""
        wide, angles = np.dtype(dtype).itemsize, 2 * 4 * self.half
        stored = np.dtype(self.quantised or dtype).itemsize
        read = (self.heads + 2 * self.kv_heads) * self.head_dim * wide + angles
        scales = 2 * self.kv_heads * 4 if self.quantised else 0
        written = self.heads * self.head_dim * wide
        written += 2 * self.kv_heads * self.head_dim * stored + scales
        return self.tokens * (read + written)

    def flops(self) -> int:
        """Returns the FLOPs of the rotation."""
        return self.tokens * (self.heads + self.kv_heads) * self.half * 6


CASES = (
    Case("one-token", 1, 2, 8, 2, 1, 64, 32, ci=True),
    Case("groups", 9, 3, 16, 8, 2, 64, 32, padding_tokens=3, ci=True),
    Case("norm", 6, 3, 8, 4, 2, 128, 64, norm=True, padding_tokens=2, ci=True),
    Case("odd-heads", 5, 2, 8, 15, 5, 64, 32, norm=True, padding_tokens=1, ci=True),
    Case("partly-turned", 4, 2, 8, 4, 2, 96, 16, norm=True, padding_tokens=1, ci=True),
    Case("width-80", 4, 2, 8, 2, 1, 80, 40, padding_tokens=1, ci=True),
    Case("width-6", 4, 2, 4, 4, 2, 6, 3, norm=True, padding_tokens=1, ci=True),
    Case("width-256", 3, 1, 16, 2, 1, 256, 128, norm=True, ci=True),
    Case("values-int8", 5, 2, 8, 6, 3, 64, 16, quantised="int8", value_norm=True, ci=True),
    Case("values", 6, 3, 8, 4, 2, 64, 16, True, padding_tokens=2, value_norm=True, ci=True),
    Case("fp8", 6, 2, 8, 4, 2, 128, 64, quantised="float8_e4m3fn", padding_tokens=2, ci=True),
    Case("int8-norm", 5, 2, 8, 6, 3, 64, 16, True, "int8", padding_tokens=2, ci=True),
    Case("only-padding", 0, 2, 8, 4, 2, 64, 32, padding_tokens=5, ci=True),
    Case("llama-decode-1", 1, 4096),
    Case("llama-decode-8", 8, 4096),
    Case("llama-decode-64", 64, 4096),
    Case("llama-decode-64-fp8", 64, 4096, quantised="float8_e4m3fn"),
    Case("llama-decode-64-int8", 64, 4096, quantised="int8"),
    Case("qwen3-decode-64", 64, 4096, norm=True),
    Case("gemma4-decode-1", 1, 4096, heads=16, head_dim=256, half=128, norm=True, value_norm=True),
    Case("llama-prefill-2048", 2048, 4096),
    Case("llama-prefill-8192", 8192, 4096),
    Case("llama-prefill-8192-fp8", 8192, 4096, quantised="float8_e4m3fn"),
    Case("qwen3-prefill-8192", 8192, 4096, norm=True),
)
