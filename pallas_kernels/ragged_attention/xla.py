"""`ragged_attention` in plain XLA: the implementation that it shares with `latent_attention`."""

from pallas_kernels.packed.prefill_attention import prefill_attention as ragged_attention

__all__ = ["ragged_attention"]
