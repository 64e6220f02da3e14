"""Reference of `skinny_matmul`: the product and its epilogue in float32."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.formats.few_bits import FewBits


def skinny_matmul(
    weight: Shaped[Array, "weights inner"] | FewBits,
    x: Float[Array, "rows inner"],
    *,
    bias: Float[Array, " weights"] | None = None,
    residual: Float[Array, "rows out"] | None = None,
    squares: Float[Array, "parts rows"] | None = None,
    norm_eps: float = 0.0,
    next_norm: Float[Array, "norms out"] | None = None,
    norm_row: int = 0,
    activation: str | None = None,
    gated: bool = False,
    gate_multiplier: float = 1.0,
    result: DTypeLike | None = None,
) -> Float[Array, "rows out"] | tuple[Array, Array, Array]:
    """Implements `api.skinny_matmul`, rounded once, at the end."""
    if isinstance(weight, FewBits):
        x = x if weight.order is None else x[:, weight.order]
        weight = weight.widened()
    total = jnp.einsum(
        "ri,oi->ro",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if squares is not None:
        mean_square = jnp.sum(squares, axis=0) / x.shape[1]
        total *= jax.lax.rsqrt(mean_square + norm_eps)[:, None]
    if bias is not None:
        total += bias.astype(jnp.float32)[None]
    total, *ups = jnp.split(total, 2, axis=1) if gated else [total]
    total *= gate_multiplier
    if activation is not None:
        total = ACTIVATIONS[activation](total)
    for up in ups:
        total *= up
    if residual is not None:
        total += residual.astype(jnp.float32)
    out = total.astype(x.dtype if result is None else result)
    if next_norm is None:
        return out
    wide = out.astype(jnp.float32)
    weighed = wide * next_norm[norm_row].astype(jnp.float32)[None]
    return out, weighed.astype(out.dtype), jnp.sum(wide * wide, axis=1)[None]
