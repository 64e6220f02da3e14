"""Records of latent attention, one byte per latent number: what FlashMLA, vLLM and FastDeploy keep of a token.

A record is the latent in float8_e4m3fn, one float32 scale per 128 of it, and the rotary key in bfloat16, one behind the
other and little-endian: 512 + 16 + 128 = 656 bytes for DeepSeek. The planar form is the same three parts as arrays of
their own. Knows no page.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.formats.quantise import largest_of, scales_of, stored

GROUP = 128
"""Numbers of a latent that share a scale."""

_SMALLEST_POWER = np.float32(1e-4)  # what FlashMLA bounds amax / 448 by before it rounds up


class Planar(NamedTuple):
    """Records as three arrays.

    Attributes:
        latent: float8_e4m3fn; times its group's scale it is the number.
        scales: float32, one per group of 128; NaN where the group was no number.
        rope: bfloat16, as it was given.
    """

    latent: Shaped[Array, "*records rank"]
    scales: Float[Array, "*records groups"]
    rope: Shaped[Array, "*records rope_dim"]


def record_bytes(rank: int, rope_dim: int) -> int:
    """Returns the bytes of a record; `rank` is a multiple of 128."""
    return rank + 4 * (rank // GROUP) + 2 * rope_dim


def encode_records(
    latent: Float[Array, "*records rank"],
    rope: Float[Array, "*records rope_dim"],
    *,
    power_of_two: bool = False,
) -> UInt8[Array, "*records bytes"]:
    """Rounds latents to the nearest multiples of their groups' scales, ties to even, and packs records.

    A group that holds NaN or infinity gets NaN as its scale and zeros as its numbers. In a jitted step nothing can
    raise; like this every reader of the token meets NaN, which the engine's check of the logits turns into the failure
    of that one request, where saturated numbers would look like an answer.

    Args:
        latent: computed with in float32; its size is a multiple of 128.
        rope: rounded to bfloat16, otherwise as it is, NaN and infinity included.
        power_of_two: scales are rounded up to powers of two, and are 2**-13 at least, as FlashMLA's quantiser has
            them; otherwise they are the group's largest magnitude times float32(1 / 448), and the smallest normal
            number at least.

    Raises:
        ValueError: the latent's size is no multiple of 128.
    """
    return join_records(quantise_records(latent, rope, power_of_two=power_of_two))


def quantise_records(
    latent: Float[Array, "*records rank"],
    rope: Float[Array, "*records rope_dim"],
    *,
    power_of_two: bool = False,
) -> Planar:
    """Does what `encode_records` does and leaves the parts apart."""
    rank = latent.shape[-1]
    _check_rank(rank)
    wide = latent.astype(jnp.float32).reshape(*latent.shape[:-1], rank // GROUP, GROUP)
    scales = scales_of(largest_of(wide), jnp.float8_e4m3fn)
    if power_of_two:
        scales = round_up(jnp.maximum(scales, _SMALLEST_POWER))
    numbers = stored(wide, scales[..., None], jnp.float8_e4m3fn)
    return Planar(numbers.reshape(latent.shape), scales, rope.astype(jnp.bfloat16))


def round_up(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the smallest powers of two that are no less than these positive normal numbers; NaN stays NaN."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    # All that is below the exponent carries into it.
    power = (bits + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000)
    return jnp.where(scales == scales, lax.bitcast_convert_type(power, jnp.float32), scales)


def join_records(planar: Planar) -> UInt8[Array, "*records bytes"]:
    """Packs the three parts; every bit stays what it is."""
    parts = (_as_bytes(part) for part in planar)
    return jnp.concatenate(tuple(parts), axis=-1)


def split_records(records: UInt8[Array, "*records bytes"], *, rank: int) -> Planar:
    """Takes records apart; every bit stays what it is.

    Raises:
        ValueError: these are no records of that rank.
    """
    _check_rank(rank)
    rest = records.shape[-1] - record_bytes(rank, 0)
    if records.dtype != jnp.uint8 or rest < 0 or rest % 2:
        raise ValueError(
            f"records of rank {rank} are uint8, {record_bytes(rank, 0)} bytes and 2 per rotary number; "
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
    """Returns latent times scales, then the rotary key, in float32.

    Raises:
        ValueError: these are no records of that rank.
    """
    latent, scales, rope = split_records(records, rank=rank)
    factors = jnp.repeat(scales, GROUP, axis=-1)
    return jnp.concatenate(
        (latent.astype(jnp.float32) * factors, rope.astype(jnp.float32)), axis=-1
    )


def _check_rank(rank: int) -> None:
    if rank % GROUP or not rank:
        raise ValueError(
            f"a record's latent must be a multiple of {GROUP} numbers, got {rank}; keep it in a plain dtype"
        )


def _as_bytes(part: Shaped[Array, "*records size"]) -> UInt8[Array, "*records bytes"]:
    """The numbers' bytes, the lowest first, as NVIDIA GPUs and the hosts they are in store them."""
    octets = lax.bitcast_convert_type(part, jnp.uint8)
    return octets.reshape(*part.shape[:-1], part.shape[-1] * part.dtype.itemsize)


def _from_bytes(octets: UInt8[Array, "*records bytes"], dtype: type) -> Shaped[Array, "..."]:
    size = jnp.dtype(dtype).itemsize
    grouped = octets.reshape(*octets.shape[:-1], octets.shape[-1] // size, size)
    return lax.bitcast_convert_type(grouped, dtype)
