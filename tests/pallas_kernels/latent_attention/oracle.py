"""What `latent_attention` means, by way of the other oracles, and whether a result is that."""

import jax.numpy as jnp

from tests.pallas_kernels import oracle
from tests.tolerances import assert_lse, assert_output


def latent_attention(q, latent_pages, page_table, seq_lens, cu_q_lens=None, *, value_dim, scale):
    """One key head, whose values are the beginning of its keys, in float64."""
    attend, bounds = oracle.paged_attention, ()
    if cu_q_lens is not None:
        attend, bounds = oracle.ragged_attention, (cu_q_lens,)
    options = {"window": None, "soft_cap": None, "sinks": None, "scale": scale}
    arrays = (q, latent_pages, latent_pages, page_table % len(latent_pages), seq_lens, *bounds)
    out, lse = attend(*arrays, **options)
    return out[..., :value_dim], lse


def assert_is_oracle(result, inputs, dtype):
    out, lse = result
    wanted_out, wanted_lse = latent_attention(**inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == jnp.float32
    assert_output(out, wanted_out, dtype)
    assert_lse(lse, wanted_lse)
