"""`latent_attention` in plain XLA: paged attention with latents as keys and values, cut to `value_dim` components."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.packed.decode_attention import decode_attention
from pallas_kernels.packed.prefill_attention import prefill_attention


def latent_attention(
    q: Float[Array, "tokens heads latent_and_rope"],
    latent_pages: Float[Array, "pages page_size 1 latent_and_rope"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None = None,
    *,
    value_dim: int,
    scale: float,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Implements `api.latent_attention`; returns the output in q's dtype and the log-sum-exp in float32."""
    pools = (latent_pages, latent_pages, page_table, seq_lens)
    plain: dict[str, Any] = {"window": None, "soft_cap": None, "sinks": None}
    if cu_q_lens is None:
        out, lse = decode_attention(q, *pools, scale=scale, **plain)
    else:
        out, lse = prefill_attention(q, *pools, cu_q_lens, scale=scale, **plain)
    return out[..., :value_dim], lse
