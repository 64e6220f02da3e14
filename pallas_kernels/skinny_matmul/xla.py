"""`skinny_matmul` in plain XLA: a library product and fused element-wise operations, for any number of rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.fixed_order import by_row_tiles
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import product, rounded_rows
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.skinny_matmul.weighed import Weighed, inverse_root, weigh


def skinny_matmul(
    arrays: MatmulArrays, options: MatmulOptions
) -> Float[Array, "rows out"] | Weighed:
    """Implements `api.skinny_matmul`; the library rounds the product to the result's dtype before the epilogue.

    float32 inputs are multiplied at the highest precision: on NVIDIA GPUs the default would round them to TF32.
    """
    weight, x, bias, residual, squares, next_norm = arrays
    wanted = x.dtype if options.result is None else jnp.dtype(options.result)

    summed = wanted if squares is None else jnp.dtype(jnp.float32)
    if not isinstance(weight, FewBits):
        total = by_row_tiles(partial(_multiply, weight, summed), x)
    elif weight.rounds_rows:
        codes, scales = rounded_rows(x)
        # Codes of e4m3 are exact in x's dtype.
        total = product(weight, codes.astype(x.dtype)) * scales[:, None]
    else:
        total = product(weight, x, result=summed)
    if squares is not None:
        total *= inverse_root(squares, x.shape[1], options.norm_eps)
    total = total.astype(wanted)
    if bias is not None:
        total += bias.astype(wanted)[None]
    if options.gated or options.activation is not None or options.gate_multiplier != 1.0:
        total = _activated(total, options)
    total = total if residual is None else total + residual.astype(wanted)
    return total if next_norm is None else weigh(total, next_norm[options.norm_row])


def _multiply(
    weight: Float[Array, "weights inner"], summed: DTypeLike, x: Float[Array, "rows inner"]
) -> Float[Array, "rows weights"]:
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=summed,
    )


def _activated(
    total: Float[Array, "rows weights"], options: MatmulOptions
) -> Float[Array, "rows out"]:
    """Applies the activation in float32 to all columns; if gated, to the first half, which multiplies the second."""
    wide, *ups = jnp.split(total.astype(jnp.float32), 2 if options.gated else 1, axis=1)
    wide = wide if options.gate_multiplier == 1.0 else wide * options.gate_multiplier
    wide = wide if options.activation is None else ACTIVATIONS[options.activation](wide)
    for up in ups:
        wide *= up
    return wide.astype(total.dtype)
