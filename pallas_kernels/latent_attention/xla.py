"""`latent_attention` in plain XLA: paged attention with latents as keys and values, cut to `value_dim` components."""

from jaxtyping import Array, Float

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
from pallas_kernels.packed.decode_attention import decode_attention
from pallas_kernels.packed.prefill_attention import prefill_attention


def latent_attention(
    arrays: LatentArrays, options: LatentOptions
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Implements `api.latent_attention`; returns the output in q's dtype and the log-sum-exp in float32."""
    q, latents = arrays[:2]
    attend = decode_attention if arrays.cu_q_lens is None else prefill_attention
    out, lse = attend(
        AttentionArrays(q, latents, latents, *arrays[2:]), ScoreOptions(options.scale)
    )
    return out[..., : options.value_dim], lse
