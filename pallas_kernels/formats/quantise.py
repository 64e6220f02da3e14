"""Keys and values in one byte per number, with one float32 scale per token and head. Knows no page."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats.eight_bit import LARGEST

SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)
"""Scale of a row of zeros: dividing by a smaller one could overflow, or meet a device that flushes it to 0."""


def quantise(
    values: Float[Array, "tokens heads head_dim"], dtype: DTypeLike
) -> tuple[Shaped[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]:
    """Rounds each row to the nearest multiples of its scale that `dtype` holds, ties to even.

    A row that holds NaN or infinity gets NaN as its scale and zeros in its place, so that whatever reads it turns
    into NaN instead of looking like an answer.

    Args:
        values: what to store; computed with in float32.
        dtype: float8_e4m3fn or int8.

    Returns:
        The stored numbers and their scales: `value = stored * scale`.
    """
    wide = values.astype(jnp.float32)
    scales = scales_of(largest_of(wide), dtype)
    return stored(wide, scales[..., None], dtype), scales


def dequantise(
    stored: Shaped[Array, "... head_dim"], scales: Float[Array, "..."]
) -> Float[Array, "... head_dim"]:
    """Returns the stored numbers times their scales, in float32."""
    return stored.astype(jnp.float32) * scales[..., None]


def largest_of(wide: Float[Array, "... head_dim"]) -> Float[Array, "..."]:
    """Returns each row's largest magnitude, NaN if it holds NaN or infinity.

    Asked for in words: the largest of a row that holds NaN is a number where XLA compiles for CPUs (jax 0.11.2).
    """
    magnitudes = jnp.abs(wide)
    is_finite = jnp.all(magnitudes < jnp.inf, axis=-1)
    return jnp.where(is_finite, jnp.max(magnitudes, axis=-1), jnp.nan)


def scales_of(largest: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns the scales of rows whose components reach up to `largest` in magnitude.

    The factor is a constant and not a division, which compilers would turn into one only sometimes.
    """
    factor = np.float32(1 / _largest(dtype))
    scales = jnp.maximum(largest * factor, np.float32(SMALLEST_SCALE))
    return jnp.where(largest < jnp.inf, scales, jnp.nan)


def stored(
    wide: Float[Array, "..."], scales: Float[Array, "..."], dtype: DTypeLike
) -> Shaped[Array, "..."]:
    """Rounds float32 numbers to `dtype`, given scales of a shape that broadcasts to theirs.

    Clamped first: the cast turns what is too large into NaN, which rounding can reach by one part in 2**23.
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
