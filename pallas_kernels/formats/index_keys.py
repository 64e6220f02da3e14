"""Pages of indexer keys: one byte per number and planar within a page, as DeepGEMM reads them, or plain numbers.

A page of bytes holds the float8_e4m3fn keys of its tokens, one behind the other, then their float32 scales. Its shape
`[page_size, index_dim + 4]` only counts: byte d of token t lies at `t * index_dim + d` of the page, its scale at
`page_size * index_dim + 4 * t`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.formats.latent_records import round_up
from pallas_kernels.formats.quantise import dequantise, largest_of, scales_of, stored
from pallas_kernels.page_write.xla import page_write, two_at_least

SCALE_BYTES = 4

# DeepGEMM bounds a key's largest magnitude by 1e-4 before it is divided by 448.
_SMALLEST_AMAX = np.float32(1e-4)


class IndexKeys(NamedTuple):
    """Keys as they are stored: float8_e4m3fn numbers and one float32 scale for all of a key's numbers."""

    numbers: Shaped[Array, "*keys index_dim"]
    scales: Float[Array, "*keys"]


def quantise_keys(
    keys: Float[Array, "*keys index_dim"], *, power_of_two: bool = False
) -> IndexKeys:
    """Rounds each key to the nearest multiples of its scale, ties to even.

    A key that holds NaN or infinity gets NaN as its scale and zeros as its numbers, so that its score is NaN.

    Args:
        keys: computed with in float32.
        power_of_two: scales are rounded up to powers of two.
    """
    wide = keys.astype(jnp.float32)
    scales = scales_of(jnp.maximum(largest_of(wide), _SMALLEST_AMAX), jnp.float8_e4m3fn)
    scales = round_up(scales) if power_of_two else scales
    return IndexKeys(stored(wide, scales[..., None], jnp.float8_e4m3fn), scales)


def split_index_pages(index_pages: UInt8[Array, "*pages page_size bytes"]) -> IndexKeys:
    """Takes pages of bytes apart; every bit stays what it is."""
    *lead, page_size, width = index_pages.shape
    dim = width - SCALE_BYTES
    flat = index_pages.reshape(*lead, page_size * width)
    numbers = lax.bitcast_convert_type(flat[..., : page_size * dim], jnp.float8_e4m3fn)
    scales = flat[..., page_size * dim :].reshape(*lead, page_size, SCALE_BYTES)
    return IndexKeys(
        numbers.reshape(*lead, page_size, dim), lax.bitcast_convert_type(scales, jnp.float32)
    )


def join_index_pages(keys: IndexKeys) -> UInt8[Array, "*pages page_size bytes"]:
    """Packs pages of bytes; every bit stays what it is."""
    *lead, page_size, dim = keys.numbers.shape
    numbers = lax.bitcast_convert_type(keys.numbers, jnp.uint8).reshape(*lead, page_size * dim)
    scales = lax.bitcast_convert_type(keys.scales, jnp.uint8).reshape(*lead, page_size * 4)
    flat = jnp.concatenate((numbers, scales), axis=-1)
    return flat.reshape(*lead, page_size, dim + SCALE_BYTES)


def read_index_keys(
    index_pages: Shaped[Array, "*pages page_size width"],
) -> Float[Array, "*pages page_size index_dim"]:
    """Returns the keys in float32, of pages of bytes or of plain numbers."""
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
    """Returns the pages with each token's key at its slot, in place when the pages are donated.

    Of a page of bytes only the token's own numbers and its scale are touched.

    Args:
        index_pages: uint8 of width `index_dim + 4`, or floating numbers of width `index_dim`, to which keys are cast.
        keys: one per token.
        slots: int32 `page * page_size + offset`, all distinct; those from `pages * page_size` on write nothing.
        power_of_two: see `quantise_keys`; has no meaning for plain numbers.

    Raises:
        ValueError: keys and pages do not fit.
    """
    num_pages, page_size, width = index_pages.shape
    is_bytes = index_pages.dtype == jnp.uint8
    dim = width - SCALE_BYTES if is_bytes else width
    if keys.shape[-1] != dim:
        raise ValueError(
            f"pages of width {width} and {index_pages.dtype} hold keys of {dim} numbers, got {keys.shape[-1]}"
        )
    if not is_bytes:
        return page_write((index_pages,), (keys,), slots)[0]
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
    """Writes each run of bytes from `start` of its page on; runs outside of the pool are dropped."""
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
