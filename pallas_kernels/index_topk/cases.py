"""Shapes on which `index_topk` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import nan_filled_pages, normal, quantised


@dataclass(frozen=True)
class Case:
    """One call of `index_topk`; the defaults are those of DeepSeek-V3.2.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: (queries, keys) of each row; if `queries` is `None` in all of them, each row has one query.
        topk: most keys per query.
        index_heads: heads of a query.
        index_dim: components of a key.
        page_size: tokens per page.
        padding_tokens: number of queries after those of the last row.
        plain: whether keys are floating, in the call's dtype, instead of uint8 pages.
        queries: dtype of the queries; `None` for the call's dtype.
        few_values: whether keys take few distinct values, so that many scores are equal.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: tuple[tuple[int | None, int], ...]
    topk: int = 2048
    index_heads: int = 64
    index_dim: int = 128
    page_size: int = 64
    padding_tokens: int = 0
    plain: bool = False
    queries: str | None = None
    few_values: bool = False
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; elements that it must not read are NaN."""
        rng = np.random.default_rng(seed)
        lengths = [keys for _, keys in self.rows]
        decode = all(queries is None for queries, _ in self.rows)
        q_lens = [int(keys > 0) if queries is None else queries for queries, keys in self.rows]
        owned = len(lengths) if decode else sum(q_lens)
        tokens = owned + self.padding_tokens
        q = normal(rng, (tokens, self.index_heads, self.index_dim), self.queries or dtype)
        weights = normal(rng, (tokens, self.index_heads), "float32")
        q[owned:], weights[owned:] = np.nan, np.nan
        bounds = np.cumsum([0, *q_lens]).astype(np.int32)
        pages, page_table = self._pages(rng, lengths, dtype)
        return {
            "q": q,
            "weights": weights,
            "index_pages": pages,
            "page_table": page_table,
            "seq_lens": np.array(lengths, np.int32),
            **({} if decode else {"cu_q_lens": bounds}),
            "topk": self.topk,
        }

    def _pages(
        self, rng: np.random.Generator, lengths: list[int], dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pool, uint8 or floating, and the page table."""
        made = nan_filled_pages(
            rng,
            [(0, keys) for keys in lengths],
            shape=(1, self.index_dim),
            pools=1,
            page_size=self.page_size,
            table_width=None,
            dtype=dtype if self.plain else "float8_e4m3fn",
        )
        keys = made.pools[0][:, :, 0]
        if self.plain:
            return keys, made.page_table
        numbers, scales = keys, made.scales[0][..., 0]
        if self.few_values:
            wide = numbers.astype(np.float32) * scales[..., None]
            wide = np.where(np.isnan(wide), wide, np.sign(wide) * (np.abs(wide) > 0.6))
            numbers, scales = quantised(wide.astype(np.float32), "float8_e4m3fn")
        page_bytes = [
            part.view(np.uint8).reshape(len(keys), -1)
            for part in (numbers, scales.astype(np.float32))
        ]
        joined = np.concatenate(page_bytes, axis=1)
        return joined.reshape(*keys.shape[:2], self.index_dim + 4), made.page_table

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the minimum traffic in bytes: keys and queries read once, and slots written."""
        per_key = self.index_dim * np.dtype(dtype).itemsize if self.plain else self.index_dim + 4
        keys = sum(keys for _, keys in self.rows)
        per_head = self.index_dim * np.dtype(self.queries or dtype).itemsize + 4
        return keys * per_key + self._queries() * (self.index_heads * per_head + 4 * self.topk)

    def flops(self) -> int:
        """Returns the FLOPs of the products of queries and keys."""
        pairs = 0
        for queries, keys in self.rows:
            seen = np.arange(keys - (1 if queries is None else queries) + 1, keys + 1)
            pairs += int(seen.sum()) if keys else 0
        return 2 * pairs * self.index_heads * self.index_dim

    def _queries(self) -> int:
        return sum(int(keys > 0) if queries is None else queries for queries, keys in self.rows)


SMALL = {"index_heads": 4, "index_dim": 128, "page_size": 8, "ci": True}

# The kernel supports only this dtype of queries; XLA supports all.
_FP8 = "float8_e4m3fn"

CASES = (
    Case("decode", ((None, 37), (None, 0), (None, 5), (None, 64)), topk=16, **SMALL),
    Case("ties", ((None, 100), (None, 17)), topk=24, few_values=True, **SMALL),
    Case("q8", ((None, 70), (None, 11)), topk=12, queries=_FP8, **SMALL),
    Case("plain", ((None, 40), (None, 9)), topk=12, plain=True, **SMALL),
    Case(
        "q8-paged",
        ((None, 300), (None, 0), (None, 64), (None, 1)),
        topk=40,
        queries=_FP8,
        **{**SMALL, "index_heads": 16, "page_size": 64},
    ),
    Case(
        "q8-pairs",
        ((5, 200), (0, 0), (1, 70), (2, 2)),
        topk=24,
        padding_tokens=3,
        queries=_FP8,
        **{**SMALL, "index_heads": 48, "page_size": 128},
    ),
    Case("covers", ((None, 20), (None, 33)), topk=64, **SMALL),
    Case("ragged", ((3, 21), (0, 0), (9, 9), (1, 50)), topk=8, padding_tokens=3, **SMALL),
    Case("one-prompt", ((4, 30),), topk=12, **SMALL),
    Case("only-padding", ((0, 0),), topk=8, padding_tokens=2, **SMALL),
    Case("b32-c32768", ((None, 32768),) * 32, queries=_FP8),
    Case("b256-c32768", ((None, 32768),) * 256, queries=_FP8),
    Case("b32-c131072", ((None, 131072),) * 32, queries=_FP8),
    Case("prefill-2048-c32768", ((2048, 32768),), queries=_FP8),
)
