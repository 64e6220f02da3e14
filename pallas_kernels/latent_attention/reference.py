"""Reference of `latent_attention`: attention over one key head whose values are prefixes of its keys, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    """Returns the output and the natural logarithm of the softmax's denominator, both in float32.

    Query j of row r is at position `seq_lens[r] - q_len[r] + j` and sees that position and all before it. Without
    `cu_q_lens` each row has one query. Queries that see no key, such as padding tokens, give zeros and `-inf`.
    """
    row, sees = jnp.arange(q.shape[0], dtype=jnp.int32), seq_lens
    if cu_q_lens is not None:
        token = row
        row = jnp.sum(cu_q_lens[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        real = row < len(seq_lens)
        row = jnp.where(real, row, 0)
        sees = jnp.where(real, seq_lens[row] - (cu_q_lens[row + 1] - token - 1), 0)
    latents = latent_pages[page_table[row]].astype(jnp.float32).reshape(len(row), -1, q.shape[2])
    visible = jnp.arange(latents.shape[1], dtype=jnp.int32)[None, :] < sees[:, None]
    latents = jnp.where(visible[..., None], latents, 0.0)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("nhd,ntd->nht", q.astype(jnp.float32), latents) * scale
        scores = jnp.where(visible[:, None, :], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=2)
        empty = (sees == 0)[:, None]
        weights = jnp.where(empty[..., None], 0.0, jnp.exp(scores - lse[..., None]))
        out = jnp.einsum("nht,ntd->nhd", weights, latents[..., :value_dim])
    return out, jnp.where(empty, -jnp.inf, lse)
