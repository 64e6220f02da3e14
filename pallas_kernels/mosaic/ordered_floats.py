"""Integers in the order of floats, for kernels that compare and bisect bits. Knows no op."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

NAN = np.int32(0x7FC00000)
"""Where every NaN stands: above infinity."""


def ordered(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns integers that compare as the numbers do; both zeros are one, and NaN of any sign is the largest."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    bits = jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return jnp.where(x != x, NAN, bits)


def from_ordered(image: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the number that such an integer stands for."""
    bits = jnp.where(image < 0, image ^ np.int32(0x7FFFFFFF), image)
    return lax.bitcast_convert_type(bits, jnp.float32)
