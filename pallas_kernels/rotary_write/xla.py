"""`rotary_write` in plain XLA: norm, rotation, quantisation and scatter one after the other, in about six launches."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.fixed_order import sum_of_last
from pallas_kernels.formats.page_scatter import scatter_tokens
from pallas_kernels.formats.quantise import quantise
from pallas_kernels.rotary_write.arguments import RotaryArrays


def rotary_write(
    arrays: RotaryArrays,
    *,
    norm_eps: float = 1e-6,
    value_norm: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Implements `api.rotary_write`; it quantises if there are pools of scales."""
    pages, qkv, cos, sin, slots, norm = arrays
    kv_heads = pages[0].shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    if norm is not None:
        q, k = (_unit(x, norm_eps) * norm[i][None, None] for i, x in enumerate((q, k)))
    v = _unit(v, norm_eps) if value_norm else v
    q, k = _rotate(cos, sin, q), _rotate(cos, sin, k)
    values = (k, v)
    if len(pages) == 4:
        (k, k_scales), (v, v_scales) = (quantise(value, pages[0].dtype) for value in values)
        values = (k, v, k_scales, v_scales)
    return q, scatter_tokens(pages, values, slots)


def _unit(
    x: Float[Array, "tokens heads head_dim"], eps: float
) -> Float[Array, "tokens heads head_dim"]:
    """Divides rows by their root mean square in float32, and casts to the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean_square = sum_of_last(jnp.square(wide)) / x.shape[-1]
    return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)


def _rotate(
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    x: Float[Array, "tokens heads head_dim"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates component i with component i + half in float32; components from 2 * half on are unchanged."""
    cos, sin, half = cos[:, None], sin[:, None], cos.shape[1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), x[..., 2 * half :]), axis=-1)
