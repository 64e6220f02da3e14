"""An order-preserving map from float32 to int32, for kernels that compare and bisect bit patterns."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

NAN = np.int32(0x7FC00000)
"""Image of every NaN: above infinity."""


def ordered(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns integers that compare as the floats do; -0.0 equals 0.0, and every NaN is the largest."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    bits = jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
    return jnp.where(x != x, NAN, bits)


def from_ordered(image: Int32[Array, "..."]) -> Float32[Array, "..."]:
    """Inverts `ordered`."""
    bits = jnp.where(image < 0, image ^ np.int32(0x7FFFFFFF), image)
    return lax.bitcast_convert_type(bits, jnp.float32)
