"""Pages of indexer keys (DeepSeek sparse attention), in DeepGEMM's planar float8 format or in a floating dtype.

A uint8 page holds the float8_e4m3fn keys of all its tokens, then their float32 scales. Its shape
`[page_size, index_dim + 4]` gives only its size. Within the page, byte d of token t's key is at `t * index_dim + d`,
and the token's scale starts at `page_size * index_dim + 4 * t`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.formats.latent_records import round_up
from pallas_kernels.formats.page_scatter import scatter_tokens, two_at_least
from pallas_kernels.formats.quantise import dequantise, largest_of, scales_of, stored

SCALE_BYTES = 4

# DeepGEMM's lower bound of a key's largest magnitude, which it divides by 448 for the scale.
_SMALLEST_AMAX = np.float32(1e-4)


class IndexKeys(NamedTuple):
    """Quantised keys: float8_e4m3fn values and one float32 scale per key."""

    numbers: Shaped[Array, "*keys index_dim"]
    scales: Float[Array, "*keys"]


def quantise_keys(
    keys: Float[Array, "*keys index_dim"], *, power_of_two: bool = False
) -> IndexKeys:
    """Quantises keys to float8_e4m3fn, rounding to nearest, ties to even.

    A key that holds NaN or infinity gets a NaN scale and zero values, so that its score is NaN.

    Args:
        keys: any floating dtype; the computation is in float32.
        power_of_two: whether scales are rounded up to powers of two.
    """
    wide = keys.astype(jnp.float32)
    scales = scales_of(jnp.maximum(largest_of(wide), _SMALLEST_AMAX), jnp.float8_e4m3fn)
    scales = round_up(scales) if power_of_two else scales
    return IndexKeys(stored(wide, scales[..., None], jnp.float8_e4m3fn), scales)


def split_index_pages(index_pages: UInt8[Array, "*pages page_size bytes"]) -> IndexKeys:
    """Splits uint8 pages into keys and scales, bit for bit."""
    *lead, page_size, width = index_pages.shape
    dim = width - SCALE_BYTES
    flat = index_pages.reshape(*lead, page_size * width)
    numbers = lax.bitcast_convert_type(flat[..., : page_size * dim], jnp.float8_e4m3fn)
    scales = flat[..., page_size * dim :].reshape(*lead, page_size, SCALE_BYTES)
    return IndexKeys(
        numbers.reshape(*lead, page_size, dim), lax.bitcast_convert_type(scales, jnp.float32)
    )


def read_index_keys(
    index_pages: Shaped[Array, "*pages page_size width"],
) -> Float[Array, "*pages page_size index_dim"]:
    """Returns the keys of uint8 or floating pages in float32."""
    if index_pages.dtype != jnp.uint8:
        return index_pages.astype(jnp.float32)
    return dequantise(*split_index_pages(index_pages))


def write_index_keys(
    index_pages: Shaped[Array, "pages page_size width"],
    keys: Float[Array, "tokens index_dim"],
    slots: Int[Array, " tokens"],
    *,
    power_of_two: bool = False,
) -> Shaped[Array, "pages page_size width"]:
    """Returns the pages with each token's key written at its slot, in place if `index_pages` is donated.

    In a uint8 page only the bytes of the token's key and scale change.

    Args:
        index_pages: uint8 of width `index_dim + 4`, or a floating dtype of width `index_dim`.
        keys: one per token; cast to the dtype of floating pages.
        slots: int32 `page * page_size + offset`, all distinct; slots >= `pages * page_size` write nothing.
        power_of_two: see `quantise_keys`; ignored for floating pages.

    Raises:
        ValueError: the width of the keys does not fit the pages.
    """
    num_pages, page_size, width = index_pages.shape
    is_bytes = index_pages.dtype == jnp.uint8
    dim = width - SCALE_BYTES if is_bytes else width
    if keys.shape[-1] != dim:
        raise ValueError(
            f"{index_pages.dtype} pages of width {width} hold keys of {dim} components, got {keys.shape[-1]}"
        )
    if not is_bytes:
        return scatter_tokens((index_pages,), (keys,), slots)[0]
    (keys,), slots = two_at_least((keys,), slots, num_pages * page_size)
    numbers, scales = quantise_keys(keys, power_of_two=power_of_two)
    page, offset = lax.div(slots, page_size), lax.rem(slots, page_size)
    flat = index_pages.reshape(num_pages, page_size * width)
    key_bytes = lax.bitcast_convert_type(numbers, jnp.uint8)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    flat = _scatter(flat, key_bytes, page, offset * dim)
    flat = _scatter(flat, scale_bytes, page, page_size * dim + offset * SCALE_BYTES)
    return flat.reshape(index_pages.shape)


def _scatter(
    flat: UInt8[Array, "pages page_bytes"],
    runs: UInt8[Array, "tokens bytes"],
    page: Int[Array, " tokens"],
    start: Int[Array, " tokens"],
) -> UInt8[Array, "pages page_bytes"]:
    """Writes each run of bytes at byte `start` of its page; runs outside of the pool are dropped."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(
        flat,
        jnp.stack((page, start), axis=1),
        runs,
        numbers,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
