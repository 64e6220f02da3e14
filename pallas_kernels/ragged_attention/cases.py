"""Shapes on which `ragged_attention` is tested, measured and tuned. Host only."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.poisoned_pages import normal, poisoned_pages


@dataclass(frozen=True)
class Case:
    """One call of `ragged_attention`; the defaults are those of Llama-3.1-8B.

    Attributes:
        name: how tests and records call it.
        rows: for each row the number of its queries and of its keys, which include the queries' own.
        padding_tokens: tokens after those of the last row.
        table_width: columns of the page table; `None` for as many as the longest row needs.
        sinks: whether heads have sinks.
        ci: small enough to run everywhere.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    padding_tokens: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    table_width: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the arguments by name, as NumPy arrays; whatever must not be read holds NaN."""
        rng = np.random.default_rng(seed)
        pages = poisoned_pages(
            rng,
            [self._readable(q_len, seq_len) for q_len, seq_len in self.rows],
            shape=(self.kv_heads, self.head_dim),
            pools=2,
            page_size=self.page_size,
            table_width=self.table_width,
            dtype=dtype,
        )
        cu_q_lens = np.cumsum([0, *(q_len for q_len, _ in self.rows)]).astype(np.int32)
        tokens = int(cu_q_lens[-1]) + self.padding_tokens
        q = normal(rng, (tokens, self.heads, self.head_dim), dtype)
        q[cu_q_lens[-1] :] = np.nan
        return {
            "q": q,
            "k_pages": pages.pools[0],
            "v_pages": pages.pools[1],
            "page_table": pages.page_table,
            "seq_lens": np.array([seq_len for _, seq_len in self.rows], np.int32),
            "cu_q_lens": cu_q_lens,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "sinks": normal(rng, (self.heads,), "float32") if self.sinks else None,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Counts the bytes that must be read and written once: readable keys and values, queries, output."""
        keys = sum(stop - start for start, stop in (self._readable(*row) for row in self.rows))
        queries = sum(q_len for q_len, _ in self.rows)
        per_key, per_query = 2 * self.kv_heads * self.head_dim, 2 * self.heads * self.head_dim
        return (keys * per_key + queries * per_query) * np.dtype(dtype).itemsize

    def flops(self) -> int:
        """Counts the two products over the keys that each query sees."""
        pairs = 0
        for q_len, seq_len in self.rows:
            seen = np.arange(seq_len - q_len + 1, seq_len + 1)
            pairs += int((seen if self.window is None else np.minimum(seen, self.window)).sum())
        return 4 * pairs * self.heads * self.head_dim

    def _readable(self, q_len: int, seq_len: int) -> tuple[int, int]:
        """The positions that the row's queries see between them; none for a row without queries."""
        if q_len == 0:
            return seq_len, seq_len
        first_query = seq_len - q_len
        return (0 if self.window is None else max(0, first_query + 1 - self.window)), seq_len


def _small(name: str, rows: tuple[tuple[int, int], ...], **options: Any) -> Case:  # noqa: ANN401 - fields of Case
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, **options}
    return Case(name, rows, ci=True, **sizes)


CASES = (
    _small("one-prompt", ((37, 37),)),
    _small("prompts", ((16, 16), (1, 1), (15, 15), (17, 17)), padding_tokens=15),
    _small("chunk-after-prefix", ((20, 53), (8, 40)), padding_tokens=4),
    _small("mixed", ((1, 40), (0, 0), (30, 46), (1, 1), (5, 21), (0, 0)), padding_tokens=7),
    _small("decode-only", ((1, 5), (1, 16), (1, 17), (0, 0))),
    _small("all-padding", ((0, 0), (0, 0)), padding_tokens=8),
    _small("idle-row-in-between", ((3, 9), (0, 12), (4, 4)), padding_tokens=1),
    _small("odd-sizes", ((5, 9), (13, 13)), heads=6, kv_heads=3, head_dim=24, page_size=5),
    _small("wide-table", ((6, 10), (3, 3)), page_size=4, table_width=9),
    _small("window-edges", ((1, 7), (1, 8), (9, 9), (3, 3), (2, 6)), page_size=2, window=4),
    _small("window-in-long-rows", ((9, 200), (1, 61), (30, 90)), page_size=4, window=21),
    _small("soft-cap", ((9, 20),), soft_cap=2.0),
    _small("sinks", ((9, 20), (1, 1)), sinks=True, padding_tokens=2),
    _small("gemma-gpt-mix", ((9, 40), (1, 33)), window=16, soft_cap=5.0, sinks=True),
    _small("static", ((10, 48), (3, 3), (1, 47)), page_size=48),
    _small("static-long", ((40, 600), (1, 300)), page_size=640),
    _small("many-tiles", ((700, 700), (1, 90), (200, 333)), page_size=32, padding_tokens=123),
    Case("llama-mixed-short", ((1, 40), (17, 33)), padding_tokens=6, ci=True),
    Case("llama-1x1024", ((1024, 1024),)),
    Case("llama-8x2048-after-2048", ((2048, 4096),) * 8),
    Case("llama-1x8192", ((8192, 8192),)),
    Case("llama-1x8192-page64", ((8192, 8192),), page_size=64),
    Case("llama-1x8192-page128", ((8192, 8192),), page_size=128),
    Case("llama-1x8192-window1024", ((8192, 8192),), window=1024),
    Case("llama-chunk2048-and-63-decodes", ((2048, 6144), *((1, 2048),) * 63)),
)
