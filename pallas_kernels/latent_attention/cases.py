"""Shapes on which `latent_attention` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import nan_filled_pages, normal


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `latent_attention`; the defaults are those of DeepSeek-V3.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: for each row the number of its queries and of its latents, the queries' own included.
        packed: whether queries are packed, any number per row; otherwise each row, also an empty one, has one.
        padding_tokens: number of packed tokens after those of the last row.
        heads: heads of a query.
        value_dim: components of a latent that are its value.
        rope_dim: components of a latent after its value.
        page_size: tokens per page.
        table_width: columns of the page table; `None` for the number of pages of the longest row.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    packed: bool = False
    padding_tokens: int = 0
    heads: int = 128
    value_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    table_width: int | None = None
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; elements that it must not read are NaN."""
        rng = np.random.default_rng(seed)
        width = self.value_dim + self.rope_dim
        pages = nan_filled_pages(
            rng,
            [(0 if queries else keys, keys) for queries, keys in self.rows],
            shape=(1, width),
            pools=1,
            page_size=self.page_size,
            table_width=self.table_width,
            dtype=dtype,
        )
        owned = self.owned()
        q = normal(rng, (len(owned), self.heads, width), dtype)
        q[~owned] = np.nan
        queries = [queries for queries, _ in self.rows]
        bounds = {"cu_q_lens": np.cumsum([0, *queries]).astype(np.int32)} if self.packed else {}
        return {
            "q": q,
            "latent_pages": pages.pools[0],
            "page_table": pages.page_table,
            "seq_lens": np.array([keys for _, keys in self.rows], np.int32),
            **bounds,
            "value_dim": self.value_dim,
            "scale": (128 + self.rope_dim) ** -0.5,
        }

    def owned(self) -> np.ndarray:
        """Returns for each query whether it belongs to a row; the others are padding."""
        queries = [queries for queries, _ in self.rows]
        if not self.packed:
            return np.array(queries) > 0
        return np.arange(sum(queries) + self.padding_tokens) < sum(queries)

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the minimum traffic in bytes: visible latents and queries read, output written, once each."""
        itemsize = np.dtype(dtype).itemsize
        width = self.value_dim + self.rope_dim
        latents = sum(keys for queries, keys in self.rows if queries) * width
        queries = int(self.owned().sum()) * self.heads * (width + self.value_dim)
        return (latents + queries) * itemsize

    def flops(self) -> int:
        """Returns the FLOPs of the two products, over the latents that each query sees."""
        pairs = sum(
            int(np.arange(keys - queries + 1, keys + 1).sum()) for queries, keys in self.rows
        )
        return 2 * pairs * self.heads * (2 * self.value_dim + self.rope_dim)


def _small(name: str, rows: tuple[tuple[int, int], ...], **options: Any) -> Case:  # noqa: ANN401 - fields of Case
    sizes: dict[str, Any] = {"heads": 4, "value_dim": 16, "rope_dim": 8, "page_size": 16, **options}
    return Case(name=name, rows=rows, ci=True, **sizes)


def _decode(*seq_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((min(1, keys), keys) for keys in seq_lens)


CASES = (
    _small("page-edges", _decode(0, 1, 15, 16, 17, 40)),
    _small("wide-table", _decode(3, 9, 0, 4), page_size=4, table_width=9),
    _small("odd-sizes", _decode(5, 6, 13), heads=5, value_dim=11, rope_dim=3, page_size=5),
    _small("equal-rows", _decode(9, 9)),
    _small("all-empty", _decode(0, 0)),
    _small("value-is-all", _decode(7, 33), rope_dim=0),
    _small("one-prompt", ((37, 37),), packed=True),
    _small("chunk-after-prefix", ((20, 53), (8, 40)), packed=True, padding_tokens=4),
    _small(
        "mixed",
        ((1, 40), (0, 0), (30, 46), (1, 1), (0, 12), (5, 21)),
        packed=True,
        padding_tokens=7,
    ),
    _small("all-padding", ((0, 0), (0, 0)), packed=True, padding_tokens=8),
    Case(name="v3-b3-short", rows=_decode(0, 64, 81), ci=True, heads=16),
    Case(
        name="v3-mixed-short",
        rows=((1, 40), (5, 70)),
        packed=True,
        padding_tokens=2,
        ci=True,
        heads=16,
    ),
    Case(name="v3-b1-ctx4096", rows=((1, 4096),)),
    Case(name="v3-b8-ctx4096", rows=((1, 4096),) * 8),
    Case(name="v3-b32-ctx4096", rows=((1, 4096),) * 32),
    Case(name="v3-b64-ctx4096", rows=((1, 4096),) * 64),
    Case(name="v3-b8-ctx32768", rows=((1, 32768),) * 8),
    Case(name="v3-b256-ctx1024", rows=((1, 1024),) * 256),
    Case(name="v3-b64-ragged", rows=_decode(*range(0, 4096, 64))),
    Case(name="heads16-b1-ctx4096", rows=((1, 4096),), heads=16),
    Case(name="heads16-b32-ctx4096", rows=((1, 4096),) * 32, heads=16),
    Case(name="heads16-b64-ctx4096", rows=((1, 4096),) * 64, heads=16),
    Case(name="heads16-b64-ctx4096-page16", rows=((1, 4096),) * 64, heads=16, page_size=16),
    Case(name="heads16-b8-ctx32768", rows=((1, 32768),) * 8, heads=16),
    Case(name="heads64-b64-ctx4096", rows=((1, 4096),) * 64, heads=64),
    Case(name="v3-4x512-after-3584", rows=((512, 4096),) * 4, packed=True),
    Case(name="heads16-4x512-after-3584", rows=((512, 4096),) * 4, packed=True, heads=16),
)
