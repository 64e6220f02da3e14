"""`paged_attention` in plain XLA: the implementation that it shares with `latent_attention`."""

from pallas_kernels.packed.decode_attention import decode_attention as paged_attention

__all__ = ["paged_attention"]
