"""Reference of `paged_attention`: softmax attention of one query per row over that row's pages, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def paged_attention(
    q: Float[Array, "rows heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Returns the output and the natural logarithm of the softmax's denominator, both in float32.

    The query of row r is at position `seq_lens[r] - 1`. It sees that position and all before it, or the last `window`
    of them. A head's sink is one more logit of the denominator, without a value. An empty row gives zeros and `-inf`.
    """
    rows, heads, _ = q.shape
    group = heads // k_pages.shape[2]

    def keys_in_order(pages: Array, scales: Array | None) -> Array:
        gathered = pages[page_table].astype(jnp.float32)
        if scales is not None:
            gathered *= scales[page_table][..., None]
        return jnp.repeat(gathered.reshape(rows, -1, *pages.shape[2:]), group, axis=2)

    k, v = keys_in_order(k_pages, k_scales), keys_in_order(v_pages, v_scales)
    key_position = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    visible = key_position < seq_lens[:, None]
    if window is not None:
        visible &= key_position >= seq_lens[:, None] - window

    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("rhd,rthd->rht", q.astype(jnp.float32), k) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
        logits = scores
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (rows, heads, 1))
            logits = jnp.concatenate([scores, sink], axis=2)
        lse = jax.nn.logsumexp(logits, axis=2)
        empty = (seq_lens == 0)[:, None]
        weights = jnp.where(empty[..., None], 0.0, jnp.exp(scores - lse[..., None]))
        out = jnp.einsum("rht,rthd->rhd", weights, jnp.where(visible[..., None, None], v, 0.0))
    return out, jnp.where(empty, -jnp.inf, lse)
