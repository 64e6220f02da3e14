"""`skinny_matmul` in plain XLA: a library product and fused element-wise operations, for any number of rows."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.skinny_matmul.activations import ACTIVATIONS
from pallas_kernels.skinny_matmul.weighed import Weighed, inverse_root, weigh


def skinny_matmul(
    weight: Shaped[Array, "weights inner"],
    x: Float[Array, "rows inner"],
    *,
    scales: Float[Array, " weights"] | None = None,
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
) -> Float[Array, "rows out"] | Weighed:
    """Implements `api.skinny_matmul`; the library rounds the product to the result's dtype before the epilogue.

    float32 inputs are multiplied at the highest precision: on NVIDIA GPUs the default would round them to TF32.
    """
    wanted = x.dtype if result is None else jnp.dtype(result)
    total = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=wanted if scales is None and squares is None else jnp.float32,
    )
    if scales is not None:
        total *= scales.astype(jnp.float32)[None]
    if squares is not None:
        total *= inverse_root(squares, x.shape[1], norm_eps)
    total = total.astype(wanted)
    if bias is not None:
        total += bias.astype(wanted)[None]
    if gated or activation is not None or gate_multiplier != 1.0:
        total = _activated(total, activation, gated=gated, gate_multiplier=gate_multiplier)
    total = total if residual is None else total + residual.astype(wanted)
    return total if next_norm is None else weigh(total, next_norm[norm_row])


def _activated(
    total: Float[Array, "rows weights"],
    activation: str | None,
    *,
    gated: bool,
    gate_multiplier: float,
) -> Float[Array, "rows out"]:
    """Applies the activation in float32 to all columns; if gated, to the first half, which multiplies the second."""
    wide, *ups = jnp.split(total.astype(jnp.float32), 2 if gated else 1, axis=1)
    wide = wide if gate_multiplier == 1.0 else wide * gate_multiplier
    wide = wide if activation is None else ACTIVATIONS[activation](wide)
    for up in ups:
        wide *= up
    return wide.astype(total.dtype)
