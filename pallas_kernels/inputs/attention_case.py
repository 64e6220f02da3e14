"""Base class of the attention ops' test cases: sizes, options, inputs, bytes moved, FLOPs. Imports no JAX."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import nan_filled_pages, normal


@dataclass(frozen=True, kw_only=True)
class AttentionCase(ABC):
    """Sizes and options of one call of an attention op; the defaults are those of Llama-3.1-8B.

    Attributes:
        table_width: columns of the page table; `None` for the number of pages of the longest row.
        window: sliding window in tokens; `None` for none.
        soft_cap: soft cap of scores; `None` for none.
        sinks: whether heads have attention sinks.
        quantised: dtype of keys and values with a scale per token and head, "float8_e4m3fn" or "int8"; `None` for
            the dtype of the queries, without scales.
        ci: whether the case is small enough for the CPU tests.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    table_width: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    quantised: str | None = None
    ci: bool = False

    @property
    @abstractmethod
    def lengths(self) -> list[tuple[int, int]]:
        """Number of queries and number of keys of each row."""

    @abstractmethod
    def tables(self) -> dict[str, np.ndarray]:
        """Returns the op's int32 tables of lengths (`seq_lens`, `cu_q_lens`) by name."""

    @abstractmethod
    def owned(self) -> np.ndarray:
        """Returns for each packed query whether it belongs to a row; the others are padding."""

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; elements that it must not read are NaN."""
        rng = np.random.default_rng(seed)
        pages = nan_filled_pages(
            rng,
            self._readable(),
            shape=(self.kv_heads, self.head_dim),
            pools=2,
            page_size=self.page_size,
            table_width=self.table_width,
            dtype=self.quantised or dtype,
        )
        owned = self.owned()
        q = normal(rng, (len(owned), self.heads, self.head_dim), dtype)
        q[~owned] = np.nan
        k_scales, v_scales = pages.scales or (None, None)
        return {
            "q": q,
            "k_pages": pages.pools[0],
            "v_pages": pages.pools[1],
            "page_table": pages.page_table,
            **self.tables(),
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "sinks": normal(rng, (self.heads,), "float32") if self.sinks else None,
            "k_scales": k_scales,
            "v_scales": v_scales,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the minimum traffic in bytes: visible keys and values and queries read, output written, once each."""
        keys = sum(stop - start for start, stop in self._readable())
        per_head = self.head_dim * np.dtype(self.quantised or dtype).itemsize
        if self.quantised:
            per_head += 4
        per_query = 2 * self.heads * self.head_dim * np.dtype(dtype).itemsize
        return 2 * keys * self.kv_heads * per_head + int(self.owned().sum()) * per_query

    def flops(self) -> int:
        """Returns the FLOPs of the two products, over the keys that each query sees."""
        pairs = 0
        for queries, keys in self.lengths:
            seen = np.arange(keys - queries + 1, keys + 1)
            pairs += int((seen if self.window is None else np.minimum(seen, self.window)).sum())
        return 4 * pairs * self.heads * self.head_dim

    def _readable(self) -> list[tuple[int, int]]:
        """Returns per row the range [start, stop) of positions that any of its queries sees; empty without queries."""
        reach = 2**31 if self.window is None else self.window
        return [
            (max(0, keys - queries + 1 - reach) if queries else keys, keys)
            for queries, keys in self.lengths
        ]
