"""`latent_attention` in plain XLA: paged attention with latents as keys and values, cut to `value_dim` components."""

from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
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
    arrays = AttentionArrays(q, latent_pages, latent_pages, page_table, seq_lens, cu_q_lens)
    attend = decode_attention if cu_q_lens is None else prefill_attention
    out, lse = attend(arrays, ScoreOptions(scale))
    return out[..., :value_dim], lse
