"""`sparse_attention` in plain XLA: gathers each token's records, then two batched products and a softmax."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.latent_records import decode_records

TEMPORARY_BYTES = 1 << 30


def sparse_attention(
    arrays: SparseArrays,
    options: LatentOptions,
    *,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]:
    """Implements `api.sparse_attention`; returns the output in q's dtype and the log-sum-exp in float32.

    Tokens are processed in batches of about `temporary_bytes` of temporary memory.
    """
    q, records, slots, counts = arrays
    tokens, heads, width = q.shape
    per_token = slots.shape[1] * (width * (4 + q.dtype.itemsize) + 8 * heads)
    batch = max(1, temporary_bytes // per_token)
    attend = partial(_attend, records, options=options)
    if is_fixed():
        # A token's products have the same shape in every step.
        return lax.map(lambda token: attend(*token), (q, slots, counts))
    if batch >= tokens:
        return jax.vmap(attend)(q, slots, counts)
    return lax.map(lambda token: attend(*token), (q, slots, counts), batch_size=batch)


def _attend(
    records: Shaped[Array, "pages page_size 1 width"],
    q: Float[Array, "heads latent_and_rope"],
    slots: Int[Array, " topk"],
    count: Int[Array, ""],
    *,
    options: LatentOptions,
) -> tuple[Float[Array, "heads value_dim"], Float[Array, " heads"]]:
    """Computes one token; slots past its count may name any record, NaN included."""
    page_size = records.shape[1]
    page, offset = lax.div(slots, page_size), lax.rem(slots, page_size)
    keys = records.at[page, offset, 0].get(mode="clip", wrap_negative_indices=False)
    if keys.dtype == jnp.uint8:
        keys = decode_records(keys, rank=options.value_dim)
    chosen = jnp.arange(len(slots), dtype=jnp.int32) < count
    keys = jnp.where(chosen[:, None], keys, jnp.zeros((), keys.dtype)).astype(q.dtype)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(chosen[None, :], multiply("hd,kd->hk", q, keys) * options.scale, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    # The maximum of a token with count 0 is -inf, and -inf - -inf would be NaN.
    weights = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = multiply("hk,kd->hd", weights.astype(q.dtype), keys[:, : options.value_dim])
    lse = jnp.where(count == 0, -jnp.inf, largest + jnp.log(total))[:, 0]
    return jnp.where(count == 0, 0.0, out / total).astype(q.dtype), lse
