"""Reference of `ragged_attention`: each packed token is one row of the reference of `paged_attention`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.paged_attention import reference


def ragged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Returns output and log-sum-exp in float32; padding tokens give zeros and `-inf`.

    Query j of row r is at position `seq_lens[r] - q_len[r] + j`.
    """
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    row = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
    real = row < seq_lens.shape[0]
    row = jnp.where(real, row, 0)
    tokens_after = cu_q_lens[row + 1] - token - 1
    visible = jnp.where(real, seq_lens[row] - tokens_after, 0)
    return reference.paged_attention(
        q,
        k_pages,
        v_pages,
        page_table[row],
        visible,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
    )
