"""Conversion of 8-bit pages to bfloat16 for the `ragged_attention` kernel, in plain XLA before the kernel.

Every page in the page table is copied, rows x table width of them, including padding and pages that rows share. Within
the limit of `why_not` that is little compared with the work of a prefill. Scales stay separate: stored values are exact
in bfloat16, their products with scales are not.
"""

from math import prod
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct

LARGEST_BYTES = 2 << 30
"""Most bytes of the copies of keys and values together, without their scales."""


class Unpacked(NamedTuple):
    """bfloat16 pages with a new page table, and each row's scales tile by tile."""

    k_pages: Float[Array, "entries page_size kv_heads head_dim"]
    v_pages: Float[Array, "entries page_size kv_heads head_dim"]
    page_table: Int[Array, "rows table_width"]
    k_scales: Float[Array, "rows kv_heads tiles keys"]
    v_scales: Float[Array, "rows kv_heads tiles keys"]


def why_not(
    k_pages: Shaped[ArrayOrStruct, "pages page_size kv_heads head_dim"],
    page_table: Int[ArrayOrStruct, "rows table_width"],
) -> str | None:
    """Returns why 8-bit pages cannot be converted for this page table, or `None` if they can."""
    copied = 2 * page_table.size * prod(k_pages.shape[1:]) * jnp.dtype(jnp.bfloat16).itemsize
    if copied <= LARGEST_BYTES:
        return None
    rows, width = page_table.shape
    return (
        f"8-bit pages of {rows} rows of {width} pages take {copied} bytes in bfloat16, "
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
    """Converts the pages of the page table; scales of keys that no query of a row sees become zeros."""
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
    """Returns the pages in the order of the page table, whose unused entries may have any value."""
    return pool.at[page_table.reshape(-1)].get(mode="clip", wrap_negative_indices=False)


def _by_tile(scales: Array, seen: Array, keys: int) -> Float[Array, "rows kv_heads tiles keys"]:
    rows, length = seen.shape
    scales = scales.reshape(rows, length, -1)
    scales = jnp.where(seen[..., None], scales, 0.0)
    scales = jnp.pad(scales, ((0, 0), (0, -length % keys), (0, 0)))
    return jnp.transpose(scales.reshape(rows, -1, keys, scales.shape[2]), (0, 3, 1, 2))
