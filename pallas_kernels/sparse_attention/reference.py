"""Reference of `sparse_attention`: softmax attention over the selected records of each token, in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats.latent_records import decode_records


def sparse_attention(
    q: Float[Array, "tokens heads latent_and_rope"],
    records: Shaped[Array, "pages page_size 1 width"],
    slots: Int[Array, "tokens topk"],
    counts: Int[Array, " tokens"],
    *,
    value_dim: int,
    scale: float,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Returns output and log-sum-exp in float32; tokens with count 0 give zeros and `-inf`.

    uint8 records are rounded to q's dtype when decoded.
    """
    flat = records.reshape(-1, records.shape[-1])
    is_bytes = flat.dtype == jnp.uint8
    numbers = decode_records(flat, rank=value_dim) if is_bytes else flat
    numbers = numbers.astype(q.dtype).astype(jnp.float32)
    chosen = jnp.arange(slots.shape[1])[None, :] < counts[:, None]
    keys = jnp.where(chosen[..., None], numbers.at[slots].get(mode="clip"), 0.0)
    scores = scale * jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), keys, precision="highest")
    scores = jnp.where(chosen[:, None, :], scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("thk,tkd->thd", weights, keys[..., :value_dim], precision="highest")
    empty = (counts == 0)[:, None]
    lse = jnp.where(empty, -jnp.inf, (largest + jnp.log(total))[..., 0])
    return jnp.where(empty[..., None], 0.0, out / jnp.where(empty[..., None], 1.0, total)), lse
