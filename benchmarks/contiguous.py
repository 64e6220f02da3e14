"""Converts a paged attention case to contiguous batches of rows with equal lengths, for attention libraries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pallas_kernels.workbench.op_benchmark import BenchInputs

# Largest number of distinct (query length, sequence length) pairs; a peer is called once for each.
_MOST_KINDS = 4


class NoPeer(RuntimeError):
    """The peer does not support the case on this machine; the message gives the reason."""


@dataclass(frozen=True)
class Contiguous:
    """Contiguous rows of equal lengths: their queries, and the keys and values that these see.

    Attributes:
        tokens: int [rows * queries], indices of the queries in the case.
        q, k, v: [rows, length, heads, head_dim].
        scale: factor on the scores.
        window: keys that a query sees; `None` for all, or if `k` and `v` are already cut to the window.
        causal: a query does not see later keys; otherwise it sees all.
    """

    tokens: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    window: int | None
    causal: bool


@lru_cache(maxsize=1)
def lay_out(bench: BenchInputs) -> list[Contiguous]:
    """Gathers an attention case's keys and values, cached for all peers; raises `NoPeer` if no peer supports it."""
    inputs = bench.inputs
    if "latent_pages" in inputs:
        return [_latents_alike(inputs)]
    if inputs["soft_cap"] is not None or inputs["sinks"] is not None:
        raise NoPeer("has no soft cap and no sinks")
    if inputs["k_scales"] is not None:
        raise NoPeer("takes keys and values in the queries' dtype alone")
    seq_lens = inputs["seq_lens"].astype(np.int64)
    bounds = inputs.get("cu_q_lens", np.arange(len(seq_lens) + 1)).astype(np.int64)
    lengths = np.stack([np.diff(bounds), seq_lens], axis=1)
    if not lengths.all() or bounds[-1] != len(inputs["q"]):
        raise NoPeer("needs rows of at least one query and one key, without padding")
    kinds = np.unique(lengths, axis=0)
    if len(kinds) > _MOST_KINDS:
        raise NoPeer(f"would be called for {len(kinds)} kinds of rows")
    return [_rows_alike(inputs, bounds, np.flatnonzero((lengths == kind).all(1))) for kind in kinds]


def _rows_alike(inputs: Mapping[str, Any], bounds: np.ndarray, rows: np.ndarray) -> Contiguous:
    """Lays out rows of one query length and one sequence length."""
    q_len, seq_len = int(bounds[rows[0] + 1] - bounds[rows[0]]), int(inputs["seq_lens"][rows[0]])
    start, window = 0, inputs["window"]
    if window is not None:
        start, window = max(0, seq_len - q_len + 1 - window), None if q_len == 1 else window
    position, page_size = np.arange(start, seq_len), inputs["k_pages"].shape[1]
    pages = inputs["page_table"][rows][:, position // page_size]
    tokens = bounds[rows][:, None] + np.arange(q_len)
    return Contiguous(
        tokens=tokens.reshape(-1),
        q=inputs["q"][tokens],
        k=inputs["k_pages"][pages, position % page_size],
        v=inputs["v_pages"][pages, position % page_size],
        scale=inputs["scale"],
        window=window,
        causal=q_len > 1,
    )


def _latents_alike(inputs: Mapping[str, Any]) -> Contiguous:
    """Lays out rows of one query over latents (MLA); the heads become queries that share one KV head."""
    seq_len = int(inputs["seq_lens"][0])
    if "cu_q_lens" in inputs or not (inputs["seq_lens"] == seq_len).all() or not seq_len:
        raise NoPeer("needs rows of one query and equally many keys")
    position, page_size = np.arange(seq_len), inputs["latent_pages"].shape[1]
    pages = inputs["page_table"][:, position // page_size]
    latents = inputs["latent_pages"][pages, position % page_size]
    q = inputs["q"]
    return Contiguous(
        tokens=np.arange(q.shape[0] * q.shape[1]),
        q=q[:, :, None],
        k=latents,
        v=latents[..., : inputs["value_dim"]],
        scale=inputs["scale"],
        window=None,
        causal=False,
    )


def in_order(
    bench: BenchInputs, cases: Sequence[Contiguous], answers: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns the outputs of all batches, sorted by the case's order of queries."""
    together = np.concatenate([answer.reshape(-1, *answer.shape[2:]) for answer in answers])
    out = np.empty_like(together)
    out[np.concatenate([case.tokens for case in cases])] = together
    return out.reshape(*bench.inputs["q"].shape[:2], -1)
