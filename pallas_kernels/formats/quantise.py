"""Quantisation of keys and values to float8_e4m3fn or int8, with one float32 scale per token and head."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats.eight_bit import LARGEST

SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)
"""Smallest scale, used for rows of zeros. Division by a smaller one could overflow, or the device may flush it to 0."""


def quantise(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> tuple[Shaped[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Quantises each row (one token, one head), rounding to nearest, ties to even.

    A row that holds NaN or infinity gets a NaN scale and zero values, so that every result computed from it is NaN
    instead of a plausible number.

    Args:
        values: any floating dtype; the computation is in float32.
        dtype: float8_e4m3fn or int8.

    Returns:
        The stored values in `dtype` and their scales: `value = stored * scale`.

    Raises:
        ValueError: `dtype` is neither of the two.
    """
    wide = values.astype(jnp.float32)
    scales = scales_of(largest_of(wide), dtype)
    return stored(wide, scales[..., None], dtype), scales


def dequantise(
    stored: Shaped[Array, "... head_dim"], scales: Float[Array, "..."]
) -> Float[Array, "... head_dim"]:
    """Returns the stored values times their scales, in float32."""
    return stored.astype(jnp.float32) * scales[..., None]


def largest_of(wide: Float[Array, "... head_dim"]) -> Float[Array, "..."]:
    """Returns each row's largest magnitude, or NaN if the row holds NaN or infinity.

    The check for finite values is explicit because `jnp.max` of a row with NaN can return a number on XLA's CPU
    backend (jax 0.11.2).
    """
    magnitudes = jnp.abs(wide)
    is_finite = jnp.all(magnitudes < jnp.inf, axis=-1)
    return jnp.where(is_finite, jnp.max(magnitudes, axis=-1), jnp.nan)


def scales_of(largest: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns the scales of rows whose largest magnitudes are `largest`.

    The code multiplies by a constant reciprocal. A compiler may or may not turn a division into that product, and the
    result must not depend on it.
    """
    factor = np.float32(1 / _largest(dtype))
    scales = jnp.maximum(largest * factor, np.float32(SMALLEST_SCALE))
    return jnp.where(largest < jnp.inf, scales, jnp.nan)


def stored(
    wide: Float[Array, "..."], scales: Float[Array, "..."], dtype: DTypeLike
) -> Shaped[Array, "..."]:
    """Divides float32 values by scales that broadcast to their shape, and rounds to `dtype`.

    The quotient is clamped before the cast. Rounding can bring it one part in 2**23 above the largest value of the
    dtype, which the cast would turn into NaN.
    """
    largest = np.float32(_largest(dtype))
    scaled = jnp.clip(wide / scales, -largest, largest)
    scaled = jnp.where(scales == scales, scaled, jnp.zeros_like(scaled))
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype)


def _largest(dtype: DTypeLike) -> float:
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        raise ValueError(f"can quantise to {' and '.join(LARGEST)}, not to {name}")
    return LARGEST[name]
