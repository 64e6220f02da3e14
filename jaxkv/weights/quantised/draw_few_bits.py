"""`draw_few_bits`: random weights in 8 or 4 bits, for measurements and tests."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from pallas_kernels.formats.few_bits import FewBits

_SPREAD = {"float8_e4m3fn": 1.0, "int8": 74.0, "int4": 4.6, "float4_e2m1fn": 2.7}
"""Code -> standard deviation of the drawn numbers before their scale."""


def draw_few_bits(key: PRNGKeyArray, types: FewBits, deviation: float) -> FewBits:
    """Returns random weights; all scales are one number, and zero points are in the middle.

    Args:
        key: key of the draws.
        types: the weight with `jax.ShapeDtypeStruct`s in the place of arrays, without `order`.
        deviation: standard deviation of the weights; with scales of float8_e8m0fnu, a power of two near it.
    """
    shape, stored = types.codes.shape, types.codes.dtype
    if types.code == "float8_e4m3fn":
        codes = jax.random.normal(key, shape, jnp.bfloat16).astype(stored)
    else:
        codes = jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), stored)
    scale = np.float32(deviation / _SPREAD[types.code])
    scales = jnp.full(types.scales.shape, scale, jnp.float32).astype(types.scales.dtype)
    zeros = None if types.zeros is None else jnp.full(types.zeros.shape, 8, jnp.uint8)
    return replace(types, codes=codes, scales=scales, zeros=zeros)
