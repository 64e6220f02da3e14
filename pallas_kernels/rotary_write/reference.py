"""Reference of `rotary_write`: rotates each head's pairs as complex numbers, then `page_write`'s reference."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats.quantise import quantise
from pallas_kernels.page_write import reference as writer


def rotary_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    qkv: Float[Array, "tokens all_heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    slots: Int[Array, " tokens"],
    *,
    norm: Float[Array, "2 head_dim"] | None = None,
    norm_eps: float = 1e-6,
    value_norm: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Computes in float32; rounds to qkv's dtype after the norm, after its weight, and after the rotation."""
    kv_heads = pages[0].shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    rows = [qkv[:, head] for head in range(qkv.shape[1])]
    for head in range(heads + kv_heads):
        if norm is not None:
            rows[head] = _normalised(rows[head], norm[int(head >= heads)], norm_eps)
        rows[head] = _turned(rows[head], cos, sin)
    for head in range(heads + kv_heads, len(rows)):
        if value_norm:
            rows[head] = _normalised(rows[head], jnp.ones_like(rows[head][0]), norm_eps)
    q, k, v = (
        jnp.stack(part, axis=1)
        for part in (rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :])
    )
    if len(pages) == 2:
        return q, writer.page_write(pages, (k, v), slots)
    (k, k_scales), (v, v_scales) = (quantise(value, pages[0].dtype) for value in (k, v))
    return q, writer.page_write(pages, (k, v, k_scales, v_scales), slots)


def _normalised(
    row: Float[Array, "tokens head_dim"], weight: Float[Array, " head_dim"], eps: float
) -> Float[Array, "tokens head_dim"]:
    wide = row.astype(jnp.float32)
    root = jnp.sqrt(jnp.sum(wide * wide, axis=1, keepdims=True) / row.shape[1] + eps)
    unit = (wide / root).astype(row.dtype).astype(jnp.float32)
    return (unit * weight[None].astype(jnp.float32)).astype(row.dtype)


def _turned(
    row: Float[Array, "tokens head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> Float[Array, "tokens head_dim"]:
    half = cos.shape[1]
    wide = row.astype(jnp.float32)
    pairs = jax.lax.complex(wide[:, :half], wide[:, half : 2 * half]) * jax.lax.complex(cos, sin)
    turned = jnp.concatenate((pairs.real, pairs.imag), axis=1).astype(row.dtype)
    return jnp.concatenate((turned, row[:, 2 * half :]), axis=1)
