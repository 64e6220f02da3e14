"""Benchmark inputs of the attention ops: rotated page pools, and the reference's results for sampled queries."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.latent_attention import reference as latent_reference
from pallas_kernels.paged_attention import reference as attention_reference

_MOST_BYTES = 8 * 2**30
_MOST_QUERIES = 512
_REFERENCE_BYTES = 512 * 2**20
_POOLS = ("k_pages", "v_pages", "k_scales", "v_scales", "latent_pages", "index_pages")


def repeat_pages(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared arrays and per-call arrays; each call reads its own copy of the pages.

    All copies are in one larger pool, as in a cache; a call's page table points to its copy.
    """
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    pools = [name for name in _POOLS if name in arrays]
    copies = max(2, min(copies, _MOST_BYTES // sum(arrays[name].nbytes for name in pools)))
    table, num_pages = arrays.pop("page_table"), len(arrays[pools[0]])
    for name in pools:
        arrays[name] = jnp.concatenate([arrays[name]] * copies)
    return arrays, [{"page_table": table + jnp.int32(copy * num_pages)} for copy in range(copies)]


def answer(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's outputs of `paged_attention` or `ragged_attention` for the sampled queries."""
    names = ("k_pages", "v_pages", "sinks", "k_scales", "v_scales")
    arrays = {name: jnp.asarray(inputs[name]) for name in names if inputs[name] is not None}
    options = {name: inputs[name] for name in ("scale", "window", "soft_cap")}
    attend = jax.jit(partial(attention_reference.paged_attention, **options))
    # The reference repeats the keys for each head.
    per_key = inputs["q"].shape[1] * inputs["q"].shape[2]
    return _by_queries(inputs, partial(attend, **arrays), inputs["k_pages"].shape[1], per_key)


def latent_answer(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's outputs of `latent_attention` for the sampled queries."""
    options = {name: inputs[name] for name in ("scale", "value_dim")}
    attend = jax.jit(partial(latent_reference.latent_attention, **options))
    pages = jnp.asarray(inputs["latent_pages"])
    # The latents themselves, and scores and weights of all heads.
    per_key = inputs["q"].shape[2] + 2 * inputs["q"].shape[1]
    return _by_queries(inputs, partial(attend, latent_pages=pages), pages.shape[1], per_key)


def _by_queries(
    inputs: Mapping[str, Any],
    attend: Callable[..., tuple[Array, Array]],
    page_size: int,
    numbers_per_key: int,
) -> list[np.ndarray]:
    """Runs the reference on the sampled queries in parts, each query as a row of its own.

    The reference gathers all keys of each query, so a part's size is limited by memory.
    """
    q, page_table, seq_lens = (inputs[name] for name in ("q", "page_table", "seq_lens"))
    rows, visible = np.arange(len(seq_lens)), seq_lens
    if "cu_q_lens" in inputs:
        rows, visible = _rows_of_tokens(inputs["cu_q_lens"], seq_lens, len(q))
    keys = page_table.shape[1] * page_size

    def run(part: np.ndarray) -> tuple[Array, ...]:
        chosen = (q[part], page_table[rows[part]], visible[part])
        names = ("q", "page_table", "seq_lens")
        return attend(**dict(zip(names, map(jnp.asarray, chosen), strict=True)))[:1]

    return in_parts(some_queries(inputs), _REFERENCE_BYTES // (keys * numbers_per_key * 4), run)


def in_parts(
    queries: np.ndarray, step: int, run: Callable[[np.ndarray], tuple[Array, ...]]
) -> list[np.ndarray]:
    """Returns the concatenated results of `run` on at most `max(1, step)` queries at a time."""
    step, parts = max(1, step), []
    for start in range(0, len(queries), step):
        # Every part has the same size, so that one compiled program serves all; the last part repeats queries.
        part = np.resize(queries[start : start + step], min(step, len(queries)))
        parts.append([np.asarray(result) for result in run(part)])
    return [np.concatenate(of_all)[: len(queries)] for of_all in zip(*parts, strict=True)]


def some_queries(inputs: Mapping[str, Any]) -> np.ndarray:
    """Returns indices of sampled queries: each row's first and last, and at most `_MOST_QUERIES` spread evenly.

    The reference takes milliseconds per query, too long for all of them.
    """
    tokens = len(inputs["q"])
    spread = np.linspace(0, tokens - 1, min(tokens, _MOST_QUERIES)).astype(np.int64)
    bounds = inputs.get("cu_q_lens", np.zeros(0, np.int64)).astype(np.int64)
    ends = np.concatenate([bounds, bounds - 1])
    return np.unique(np.concatenate([spread, ends[(ends >= 0) & (ends < tokens)]]))


def _rows_of_tokens(
    cu_q_lens: np.ndarray, seq_lens: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of each packed token and the number of keys it sees; padding tokens have row 0 and no keys."""
    q_lens = np.diff(cu_q_lens)
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    visible = seq_lens[rows] - (cu_q_lens[rows + 1] - np.arange(len(rows)) - 1)
    padding = np.zeros(tokens - len(rows), np.int32)
    return np.append(rows, padding), np.append(visible, padding).astype(np.int32)
