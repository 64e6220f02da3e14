"""The FP8 record format of MLA's KV cache, as in FlashMLA, vLLM and FastDeploy.

A token's record is the latent in float8_e4m3fn, one float32 scale per 128 of its components, and the rotary key in
bfloat16, concatenated and little-endian: 512 + 16 + 128 = 656 bytes for DeepSeek. The planar form has the same three
parts as separate arrays.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.formats.quantise import largest_of, scales_of, stored

GROUP = 128
"""Components of a latent that share a scale."""

_SMALLEST_POWER = np.float32(1e-4)  # FlashMLA's lower bound of amax / 448, before it rounds up


class Planar(NamedTuple):
    """Records as three arrays.

    Attributes:
        latent: float8_e4m3fn; multiplied by its group's scale it is the latent.
        scales: float32, one per group of 128; NaN if the group held NaN or infinity.
        rope: the rotary key, bfloat16, not quantised.
    """

    latent: Shaped[Array, "*records rank"]
    scales: Float[Array, "*records groups"]
    rope: Shaped[Array, "*records rope_dim"]


def record_bytes(rank: int, rope_dim: int) -> int:
    """Returns the size of a record in bytes; `rank`, the latent's components, must be a multiple of 128."""
    return rank + 4 * (rank // GROUP) + 2 * rope_dim


def encode_records(
    latent: Float[Array, "*records rank"],
    rope: Float[Array, "*records rope_dim"],
    *,
    power_of_two: bool = False,
) -> UInt8[Array, "*records bytes"]:
    """Quantises latents, rounding to nearest, ties to even, and packs them into records.

    A group that holds NaN or infinity gets a NaN scale and zero values. A jitted step cannot raise; with a NaN scale
    every read of the token gives NaN, and a check of the logits can fail that request. Saturated values would pass as
    a valid result.

    Args:
        latent: any floating dtype; the computation is in float32. Its size is a multiple of 128.
        rope: rounded to bfloat16 and stored as it is, NaN and infinity included.
        power_of_two: scales are rounded up to powers of two and are at least 2**-13, as in FlashMLA's quantiser.
            Otherwise a scale is the group's largest magnitude times float32(1 / 448), and at least the smallest
            normal float32.

    Raises:
        ValueError: the latent's size is not a multiple of 128.
    """
    return join_records(quantise_records(latent, rope, power_of_two=power_of_two))


def quantise_records(
    latent: Float[Array, "*records rank"],
    rope: Float[Array, "*records rope_dim"],
    *,
    power_of_two: bool = False,
) -> Planar:
    """Quantises as `encode_records` does and returns the parts as separate arrays."""
    rank = latent.shape[-1]
    _check_rank(rank)
    wide = latent.astype(jnp.float32).reshape(*latent.shape[:-1], rank // GROUP, GROUP)
    scales = scales_of(largest_of(wide), jnp.float8_e4m3fn)
    if power_of_two:
        scales = round_up(jnp.maximum(scales, _SMALLEST_POWER))
    numbers = stored(wide, scales[..., None], jnp.float8_e4m3fn)
    return Planar(numbers.reshape(latent.shape), scales, rope.astype(jnp.bfloat16))


def round_up(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the smallest powers of two >= `scales`, which are positive normal floats or NaN; NaN stays NaN."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    # A nonzero mantissa carries into the exponent.
    power = (bits + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000)
    return jnp.where(scales == scales, lax.bitcast_convert_type(power, jnp.float32), scales)


def join_records(planar: Planar) -> UInt8[Array, "*records bytes"]:
    """Joins the three parts into records, bit for bit."""
    parts = (_as_bytes(part) for part in planar)
    return jnp.concatenate(tuple(parts), axis=-1)


def split_records(records: UInt8[Array, "*records bytes"], *, rank: int) -> Planar:
    """Splits records into their three parts, bit for bit.

    Raises:
        ValueError: `records` is not uint8 or its size does not fit `rank`.
    """
    _check_rank(rank)
    rest = records.shape[-1] - record_bytes(rank, 0)
    if records.dtype != jnp.uint8 or rest < 0 or rest % 2:
        raise ValueError(
            f"records of rank {rank} are uint8 of {record_bytes(rank, 0)} bytes and 2 per rotary component; "
            f"got {records.dtype} of {records.shape[-1]}"
        )
    scales_at, rope_at = rank, record_bytes(rank, 0)
    latent = lax.bitcast_convert_type(records[..., :scales_at], jnp.float8_e4m3fn)
    return Planar(
        latent,
        _from_bytes(records[..., scales_at:rope_at], jnp.float32),
        _from_bytes(records[..., rope_at:], jnp.bfloat16),
    )


def decode_records(
    records: UInt8[Array, "*records bytes"], *, rank: int
) -> Float[Array, "*records latent_and_rope"]:
    """Returns the dequantised latent followed by the rotary key, in float32.

    Raises:
        ValueError: `records` is not uint8 or its size does not fit `rank`.
    """
    latent, scales, rope = split_records(records, rank=rank)
    factors = jnp.repeat(scales, GROUP, axis=-1)
    return jnp.concatenate(
        (latent.astype(jnp.float32) * factors, rope.astype(jnp.float32)), axis=-1
    )


def _check_rank(rank: int) -> None:
    if rank % GROUP or not rank:
        raise ValueError(
            f"a record's latent must be a multiple of {GROUP} components, got {rank}; store it in a floating dtype"
        )


def _as_bytes(part: Shaped[Array, "*records size"]) -> UInt8[Array, "*records bytes"]:
    """Returns the elements' bytes, little-endian, as NVIDIA GPUs and their hosts store them."""
    octets = lax.bitcast_convert_type(part, jnp.uint8)
    return octets.reshape(*part.shape[:-1], part.shape[-1] * part.dtype.itemsize)


def _from_bytes(octets: UInt8[Array, "*records bytes"], dtype: DTypeLike) -> Shaped[Array, "..."]:
    size = jnp.dtype(dtype).itemsize
    grouped = octets.reshape(*octets.shape[:-1], octets.shape[-1] // size, size)
    return lax.bitcast_convert_type(grouped, dtype)
