"""Turns pages of 8 bits into what the Mosaic GPU kernel of `ragged_attention` reads. Plain XLA, in a step of its own.

The pages that the page table names are copied, as bfloat16, into its order: rows times table width of them, padding and
pages that rows share included, which is little beside the work of a prefill as long as `why_not` says nothing. Scales
stay apart: stored numbers are exact in bfloat16, but their products with scales would not be.
"""

from math import prod
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

LARGEST_BYTES = 2 << 30
"""Most that the copies of keys and values may take together; their scales come on top."""


class Unpacked(NamedTuple):
    """Pages of 16 bits with a table of their own, and each row's scales tile by tile."""

    k_pages: Float[Array, "entries page_size kv_heads head_dim"]
    v_pages: Float[Array, "entries page_size kv_heads head_dim"]
    page_table: Int[Array, "rows table_width"]
    k_scales: Float[Array, "rows kv_heads tiles keys"]
    v_scales: Float[Array, "rows kv_heads tiles keys"]


def why_not(
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
) -> str | None:
    """Returns why pages of 8 bits cannot be unpacked for this page table, or `None` if they can."""
    copied = 2 * page_table.size * prod(k_pages.shape[1:]) * jnp.dtype(jnp.bfloat16).itemsize
    if copied <= LARGEST_BYTES:
        return None
    rows, width = page_table.shape
    return (
        f"pages of 8 bits for {rows} rows of {width} pages take {copied} bytes unpacked, "
        f"more than {LARGEST_BYTES}"
    )


def unpack(
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    k_scales: Float[Array, "pages page_size kv_heads"],
    v_scales: Float[Array, "pages page_size kv_heads"],
    *,
    keys: int,
    window: int | None,
) -> Unpacked:
    """Returns the pages of the table, and zeros for the scales of keys that none of a row's queries sees."""
    position = jnp.arange(page_table.shape[1] * k_pages.shape[1], dtype=jnp.int32)[None, :]
    seen = position < seq_lens[:, None]
    if window is not None:
        first_query = seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
        seen &= position > first_query[:, None] - window
    return Unpacked(
        _gather(k_pages, page_table).astype(jnp.bfloat16),
        _gather(v_pages, page_table).astype(jnp.bfloat16),
        jnp.arange(page_table.size, dtype=jnp.int32).reshape(page_table.shape),
        _by_tile(_gather(k_scales, page_table), seen, keys),
        _by_tile(_gather(v_scales, page_table), seen, keys),
    )


def _gather(pool: Array, page_table: Array) -> Array:
    """Returns the pages of all rows in the order of the table, whose unused entries may be any number."""
    return pool.at[page_table.reshape(-1)].get(mode="clip", wrap_negative_indices=False)


def _by_tile(scales: Array, seen: Array, keys: int) -> Float[Array, "rows kv_heads tiles keys"]:
    rows, length = seen.shape
    scales = scales.reshape(rows, length, -1)
    scales = jnp.where(seen[..., None], scales, 0.0)
    scales = jnp.pad(scales, ((0, 0), (0, -length % keys), (0, 0)))
    return jnp.transpose(scales.reshape(rows, -1, keys, scales.shape[2]), (0, 3, 1, 2))
