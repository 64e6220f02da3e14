"""Attention of one query per row in plain XLA: gathers each row's pages, then two batched products and a softmax."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.packed.tile_attention import QueryTiles, attend_tiles, pools_of

# Up to this much temporary memory, decode is one sequence of kernels (one CUDA graph). Beyond it, a loop visits the
# keys in blocks.
TEMPORARY_BYTES = 2 << 30


def decode_attention(
    arrays: AttentionArrays,
    options: ScoreOptions,
    *,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Returns output and float32 log-sum-exp, with one query tile per row; arguments as in `paged_attention`."""
    seq_lens = arrays.seq_lens
    tiles = QueryTiles(arrays.q[:, None], arrays.page_table, seq_lens - 1, jnp.minimum(seq_lens, 1))
    out, lse = attend_tiles(
        tiles, pools_of(arrays), arrays.sinks, options, temporary_bytes=temporary_bytes
    )
    return out[:, 0].astype(arrays.q.dtype), lse[:, 0]
