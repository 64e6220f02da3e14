"""Shapes on which `sparse_attention` is tested, measured and tuned. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal, quantised


@dataclass(frozen=True)
class Case:
    """One call of `sparse_attention`; the defaults are those of DeepSeek-V3.2.

    Attributes:
        name: the case's name in tests and benchmark records.
        counts: number of slots that each token attends to.
        keys: number of tokens of each sequence in the pool.
        topk: columns of the slots.
        heads: heads of a query.
        rank: components of a latent.
        rope_dim: components of a rotary key.
        page_size: tokens per page.
        sequences: number of sequences among which the tokens are divided equally. Each has its own copy of the same
            records.
        plain: whether records are floating, in the call's dtype, instead of uint8.
        ci: whether the case is small enough for the CPU tests.
    """

    name: str
    counts: tuple[int, ...]
    keys: int
    topk: int = 2048
    heads: int = 128
    rank: int = 512
    rope_dim: int = 64
    page_size: int = 64
    sequences: int = 1
    plain: bool = False
    ci: bool = False

    def inputs(self, seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
        """Returns the op's arguments by name, as NumPy arrays; records that no token selects are NaN."""
        rng = np.random.default_rng(seed)
        pages = -(-self.keys // self.page_size) + 2
        per_sequence, tokens = pages * self.page_size, len(self.counts)
        num_slots = per_sequence * self.sequences
        slots = np.full((tokens, self.topk), num_slots, np.int32)
        in_use = rng.permutation(per_sequence)[: self.keys]
        for token, count in enumerate(self.counts):
            first = token * self.sequences // tokens * per_sequence
            slots[token, :count] = first + rng.permutation(in_use)[:count]
        chosen = np.zeros(num_slots, bool)
        chosen[slots[slots < num_slots]] = True
        records = np.tile(self._records(rng, per_sequence, dtype), (self.sequences, 1))
        # Byte 0xFF is NaN in float8_e4m3fn, float32 and bfloat16.
        records[~chosen] = np.nan if self.plain else 0xFF
        return {
            "q": normal(rng, (tokens, self.heads, self.rank + self.rope_dim), dtype),
            "records": records.reshape(pages * self.sequences, self.page_size, 1, -1),
            "slots": slots,
            "counts": np.array(self.counts, np.int32),
            "value_dim": self.rank,
            "scale": (self.rank + self.rope_dim) ** -0.5,
        }

    def _records(self, rng: np.random.Generator, num_slots: int, dtype: str) -> np.ndarray:
        """Returns the records [slots, width], uint8 or floating."""
        latent = normal(rng, (num_slots, self.rank), "float32")
        rope = normal(rng, (num_slots, self.rope_dim), "bfloat16")
        if self.plain:
            return np.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=1)
        groups = latent.reshape(num_slots, -1, 128)
        groups = groups * 2.0 ** rng.integers(-2, 2, groups.shape[:2])[..., None].astype(np.float32)
        numbers, scales = quantised(groups, "float8_e4m3fn")
        parts = (numbers.reshape(num_slots, -1), scales.astype(np.float32), rope)
        return np.concatenate([part.view(np.uint8) for part in parts], axis=1)

    def bytes_moved(self, dtype: str = "bfloat16") -> int:
        """Returns the traffic in bytes: selected records and their slots, queries and outputs."""
        size = np.dtype(dtype).itemsize
        packed = self.rank + self.rank // 32 + 2 * self.rope_dim
        record = size * (self.rank + self.rope_dim) if self.plain else packed
        per_token = self.heads * (2 * self.rank + self.rope_dim) * size
        return sum(self.counts) * (record + 4) + len(self.counts) * per_token

    def flops(self) -> int:
        """Returns the FLOPs of the two products over the selected records."""
        return 2 * sum(self.counts) * self.heads * (2 * self.rank + self.rope_dim)


SMALL = {"heads": 4, "rank": 128, "rope_dim": 16, "page_size": 8, "ci": True}

CASES = (
    Case("bytes", (5, 0, 12, 1), 40, topk=12, **SMALL),
    Case("plain", (7, 3, 0), 30, topk=8, plain=True, **SMALL),
    Case("two-groups", (20, 33), 60, 33, 3, 256, 16, 8, ci=True),
    Case("sequences", (9, 4, 10, 0), 20, topk=10, sequences=2, **SMALL),
    Case("alike", (6, 6, 6), 20, topk=6, **SMALL),
    Case("nothing", (0, 0), 8, topk=4, **SMALL),
    # Decode rows have one sequence each; the tokens of a prompt share one.
    Case("b32", (2048,) * 32, 32768, sequences=32),
    Case("b128", (2048,) * 128, 16384, sequences=128),
    Case("s2048-bf16", (2048,) * 2048, 8192, plain=True),
)
