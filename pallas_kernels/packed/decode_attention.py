"""Attention of one query per row in plain XLA: gathers each row's pages, then two batched products and a softmax."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.packed.tile_attention import attend_tiles

# Up to this much temporary memory, decode is one sequence of kernels (one CUDA graph). Beyond it, a loop visits the
# keys in blocks.
TEMPORARY_BYTES = 2 << 30


def decode_attention(
    q: Float[Array, "rows heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Returns output and float32 log-sum-exp, with one query tile per row; arguments as in `paged_attention`."""
    out, lse = attend_tiles(
        q[:, None],
        k_pages,
        v_pages,
        page_table,
        seq_lens - 1,
        jnp.minimum(seq_lens, 1),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        temporary_bytes=temporary_bytes,
    )
    return out[:, 0].astype(q.dtype), lse[:, 0]
