"""Shapes on which `paged_attention` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.attention_case import AttentionCase


@dataclass(frozen=True)
class Case(AttentionCase):
    """One call of `paged_attention`.

    Attributes:
        name: the case's name in tests and benchmark records.
        seq_lens: number of keys of each row; 0 for an empty row.
    """

    name: str
    seq_lens: tuple[int, ...]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Number of queries and number of keys of each row; an empty row has none of either."""
        return [(min(1, seq_len), seq_len) for seq_len in self.seq_lens]

    def tables(self) -> dict[str, np.ndarray]:
        """Returns the int32 table of lengths by name."""
        return {"seq_lens": np.array(self.seq_lens, np.int32)}

    def owned(self) -> np.ndarray:
        """Returns for each row whether it has a query."""
        return np.array(self.seq_lens) > 0


def _small(name: str, seq_lens: tuple[int, ...], **options: Any) -> Case:  # noqa: ANN401 - fields of Case
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, **options}
    return Case(name, seq_lens, ci=True, **sizes)


FP8 = "float8_e4m3fn"
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
    _small("fp8", (0, 1, 15, 16, 17, 40), quantised=FP8),
    _small("int8", (0, 1, 15, 16, 17, 40), quantised="int8", soft_cap=2.0, sinks=True),
    _small("fp8-window", (0, 5, 61, 200), page_size=4, window=21, quantised=FP8),
    _small("int8-static", (0, 1, 300, 640), page_size=640, quantised="int8"),
    _small("filled-groups", (0, 5, 37), heads=30, head_dim=256, sinks=True),
    _small("filled-groups-int8", (0, 70), heads=22, head_dim=192, quantised="int8"),
    Case("llama-b3-short", (0, 64, 81), ci=True),
    Case("llama-b3-short-fp8", (0, 64, 81), quantised=FP8, ci=True),
    Case("llama-b3-short-int8", (0, 64, 81), page_size=64, quantised="int8", ci=True),
    Case("llama-b1-ctx1024", (1024,)),
    Case("llama-b1-ctx4096", (4096,)),
    Case("llama-b1-ctx16384", (16384,)),
    Case("llama-b1-ctx32768", (32768,)),
    Case("llama-b1-ctx131072", (131072,)),
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
    Case("llama-b1-ctx4096-fp8", (4096,), quantised=FP8),
    Case("llama-b1-ctx32768-fp8", (32768,), quantised=FP8),
    Case("llama-b8-ctx4096-fp8", (4096,) * 8, quantised=FP8),
    Case("llama-b64-ctx1024-fp8", (1024,) * 64, quantised=FP8),
    Case("llama-b64-ctx4096-fp8", (4096,) * 64, quantised=FP8),
    Case("llama-b64-ctx4096-page64-fp8", (4096,) * 64, page_size=64, quantised=FP8),
    Case("llama-b64-ctx4096-page64-int8", (4096,) * 64, page_size=64, quantised="int8"),
    Case("llama-b8-ctx32768-page64-fp8", (32768,) * 8, page_size=64, quantised=FP8),
    Case("b64-ctx2048-head64", (2048,) * 64, head_dim=64),
    Case("b64-ctx1024-head192", (1024,) * 64, head_dim=192),
    Case("b64-ctx1024-head256", (1024,) * 64, heads=16, kv_heads=4, head_dim=256),
    Case("b64-ctx1024-group1", (1024,) * 64, heads=8),
    Case("b64-ctx1024-group2", (1024,) * 64, heads=16),
    Case("b64-ctx2048-group7", (2048,) * 64, heads=28, kv_heads=4),
    Case("b64-ctx1024-group8", (1024,) * 64, heads=64),
    Case("b64-ctx4096-group16", (4096,) * 64, kv_heads=2),
    Case("b64-ctx8192-mqa16", (8192,) * 64, heads=16, kv_heads=1),
    Case(
        "gpt-oss-b64-ctx2048-window128", (2048,) * 64, heads=64, head_dim=64, window=128, sinks=True
    ),
)
