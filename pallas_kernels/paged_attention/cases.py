"""Shapes on which `paged_attention` is tested, measured and tuned. Host only."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.poisoned_pages import normal, poisoned_pages


@dataclass(frozen=True)
class Case:
    """One call of `paged_attention`; the defaults are those of Llama-3.1-8B.

    Attributes:
        name: how tests and records call it.
        seq_lens: keys of each row; 0 for an empty row.
        table_width: columns of the page table; `None` for as many as the longest row needs.
        sinks: whether heads have sinks.
        ci: small enough to run everywhere.
    """

    name: str
    seq_lens: tuple[int, ...]
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
            [(seq_len - self._visible(seq_len), seq_len) for seq_len in self.seq_lens],
            shape=(self.kv_heads, self.head_dim),
            pools=2,
            page_size=self.page_size,
            table_width=self.table_width,
            dtype=dtype,
        )
        q = normal(rng, (len(self.seq_lens), self.heads, self.head_dim), dtype)
        q[np.array(self.seq_lens) == 0] = np.nan
        return {
            "q": q,
            "k_pages": pages.pools[0],
            "v_pages": pages.pools[1],
            "page_table": pages.page_table,
            "seq_lens": np.array(self.seq_lens, np.int32),
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "sinks": normal(rng, (self.heads,), "float32") if self.sinks else None,
        }

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Counts the bytes that must be read and written once: visible keys and values, queries, output."""
        keys = sum(self._visible(seq_len) for seq_len in self.seq_lens)
        per_key, per_query = 2 * self.kv_heads * self.head_dim, 2 * self.heads * self.head_dim
        return (keys * per_key + len(self.seq_lens) * per_query) * np.dtype(dtype).itemsize

    def flops(self) -> int:
        """Counts the two products over visible keys."""
        keys = sum(self._visible(seq_len) for seq_len in self.seq_lens)
        return 4 * keys * self.heads * self.head_dim

    def _visible(self, seq_len: int) -> int:
        return seq_len if self.window is None else min(seq_len, self.window)


def _small(name: str, seq_lens: tuple[int, ...], **options: Any) -> Case:  # noqa: ANN401 - fields of Case
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, **options}
    return Case(name, seq_lens, ci=True, **sizes)


CASES = (
    _small("page-edges", (0, 1, 15, 16, 17, 40)),
    _small("wide-table", (3, 9, 0, 4), page_size=4, table_width=9),
    _small("odd-sizes", (5, 6, 13), heads=6, kv_heads=3, head_dim=24, page_size=5),
    _small("one-kv-head", (7, 33), kv_heads=1),
    _small("no-groups", (7, 33), kv_heads=4),
    _small("one-row", (19,)),
    _small("all-empty", (0, 0)),
    _small("page-of-one", (1, 2, 6), page_size=1),
    _small("window-edges", (1, 2, 3, 4, 5, 7, 8, 9), page_size=2, window=4, table_width=8),
    _small("window-is-page", (0, 15, 16, 17, 32, 33, 48), window=16),
    _small("window-of-one", (0, 1, 16, 17), window=1),
    _small("window-in-long-rows", (0, 5, 61, 200), page_size=4, window=21),
    _small("soft-cap", (1, 40), soft_cap=2.0),
    _small("sinks", (0, 1, 40), sinks=True),
    _small("gpt-oss-like", (0, 3, 70), heads=8, head_dim=64, window=32, sinks=True),
    _small("gemma2-like", (0, 3, 70), head_dim=64, window=32, soft_cap=50.0),
    _small("static", (0, 1, 47, 48), page_size=48),
    _small("static-long", (0, 1, 300, 640), page_size=640),
    Case("llama-b3-short", (0, 64, 81), ci=True),
    Case("llama-b1-ctx1024", (1024,)),
    Case("llama-b1-ctx4096", (4096,)),
    Case("llama-b8-ctx1024", (1024,) * 8),
    Case("llama-b8-ctx4096", (4096,) * 8),
    Case("llama-b64-ctx1024", (1024,) * 64),
    Case("llama-b64-ctx4096", (4096,) * 64),
    Case("llama-b64-ctx4096-page64", (4096,) * 64, page_size=64),
    Case("llama-b8-ctx32768", (32768,) * 8),
    Case("llama-b8-ctx32768-page64", (32768,) * 8, page_size=64),
    Case("llama-b256-ctx1024", (1024,) * 256),
    Case("llama-b64-ctx8192-window1024", (8192,) * 64, window=1024),
    Case("llama-b64-ragged", tuple(range(0, 4096, 64)), page_size=64),
)
