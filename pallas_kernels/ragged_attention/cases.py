"""Shapes on which `ragged_attention` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.attention_case import AttentionCase


@dataclass(frozen=True)
class Case(AttentionCase):
    """One call of `ragged_attention`.

    Attributes:
        name: the case's name in tests and benchmark records.
        rows: for each row the number of its queries and of its keys, the queries' own included.
        padding_tokens: number of tokens after those of the last row.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    padding_tokens: int = 0

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Number of queries and number of keys of each row."""
        return list(self.rows)

    def tables(self) -> dict[str, np.ndarray]:
        """Returns the int32 tables `seq_lens` and `cu_q_lens`."""
        bounds = np.cumsum([0, *(queries for queries, _ in self.rows)])
        keys = [keys for _, keys in self.rows]
        return {"seq_lens": np.array(keys, np.int32), "cu_q_lens": bounds.astype(np.int32)}

    def owned(self) -> np.ndarray:
        """Returns for each token whether it belongs to a row; the others are padding."""
        tokens = sum(queries for queries, _ in self.rows)
        return np.arange(tokens + self.padding_tokens) < tokens


def _small(name: str, rows: tuple[tuple[int, int], ...], **options: Any) -> Case:  # noqa: ANN401 - fields of Case
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, **options}
    return Case(name, rows, ci=True, **sizes)


FP8 = "float8_e4m3fn"
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
    _small("fp8", ((1, 40), (0, 0), (30, 46), (5, 21)), padding_tokens=7, quantised=FP8),
    _small("int8", ((9, 40), (1, 33)), soft_cap=5.0, sinks=True, quantised="int8"),
    _small("fp8-window", ((9, 200), (1, 61)), page_size=4, window=21, quantised=FP8),
    _small("int8-static", ((40, 600), (1, 300)), page_size=640, quantised="int8"),
    Case("llama-mixed-short-fp8", ((1, 40), (17, 33)), padding_tokens=6, quantised=FP8, ci=True),
    Case("llama-mixed-short", ((1, 40), (17, 33)), padding_tokens=6, ci=True),
    Case("llama-1x1024", ((1024, 1024),)),
    Case("llama-8x2048-after-2048", ((2048, 4096),) * 8),
    Case("llama-1x8192", ((8192, 8192),)),
    Case("llama-1x8192-page64", ((8192, 8192),), page_size=64),
    Case("llama-1x8192-page128", ((8192, 8192),), page_size=128),
    Case("llama-1x8192-window1024", ((8192, 8192),), window=1024),
    Case("llama-chunk2048-and-63-decodes", ((2048, 6144), *((1, 2048),) * 63)),
)
