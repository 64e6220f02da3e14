"""Test inputs of paged ops: pages in random order, NaN in every slot that no row may read. Imports no JAX."""

import math
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - registers bfloat16 and float8 with NumPy
import numpy as np
from jaxtyping import Float, Int, Shaped

from pallas_kernels.formats.eight_bit import LARGEST

# Periods with which random values repeat. They are primes, so that no two pages are equal.
_MOST_DRAWN = 2**22 - 3
_MOST_TOKENS = 2**13 - 1


@dataclass(frozen=True)
class NanFilledPages:
    """Pools in which every slot that no row may read is NaN.

    Attributes:
        page_table: ids of each row's pages in order, padded with random valid page ids.
        pools: one pool per kind of value, such as keys and values.
        scales: for 8-bit pools, one float32 pool of scales each; empty otherwise.
    """

    page_table: Int[np.ndarray, "rows table_width"]
    pools: tuple[Shaped[np.ndarray, "pages page_size ..."], ...]
    scales: tuple[Float[np.ndarray, "pages page_size heads"], ...] = ()


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draws standard normal values, rounded to `dtype`; large arrays repeat their first `_MOST_DRAWN` values."""
    count = min(math.prod(shape), _MOST_DRAWN)
    return np.resize(rng.standard_normal(count, dtype=np.float32).astype(dtype), shape)


def quantised(
    values: Float[np.ndarray, "*places head_dim"], dtype: str
) -> tuple[Shaped[np.ndarray, "*places head_dim"], Float[np.ndarray, "*places"]]:
    """Quantises to 8 bits; returns stored values and float32 scales with `value = stored * scale`."""
    scales = np.abs(values).max(axis=-1) / np.float32(LARGEST[dtype])
    exact = values / np.where(scales > 0, scales, np.float32(1))[..., None]
    stored = (np.rint(exact) if dtype == "int8" else exact).astype(dtype)
    return stored, scales


def nan_filled_pages(
    rng: np.random.Generator,
    readable: list[tuple[int, int]],
    *,
    shape: tuple[int, ...],
    pools: int,
    page_size: int,
    table_width: int | None,
    dtype: str,
    spare_pages: int = 3,
) -> NanFilledPages:
    """Gives each row random pages and fills its readable positions with random values.

    Args:
        rng: source of all randomness.
        readable: per row, the range [start, stop) of positions that it may read.
        shape: shape of one token's entry in a pool.
        pools: number of pools.
        page_size: tokens per page.
        table_width: columns of the page table; `None` for the number of pages of the longest row.
        dtype: dtype of the pools: floating, or "float8_e4m3fn" or "int8" with scales.
        spare_pages: number of pages that belong to no row.
    """
    owned = [-(-stop // page_size) for _, stop in readable]
    num_pages = sum(owned) + spare_pages
    width = max(1, *owned) if table_width is None else table_width
    page_table = rng.integers(0, num_pages, (len(readable), width), dtype=np.int32)
    shuffled = np.split(rng.permutation(num_pages).astype(np.int32), np.cumsum(owned))
    unread = np.ones((num_pages, page_size), bool)
    for row, (start, stop) in enumerate(readable):
        page_table[row, : owned[row]] = shuffled[row]
        position = np.arange(start, stop)
        unread[page_table[row, position // page_size], position % page_size] = False
    filled, scales = [], []
    tokens = np.arange(num_pages * page_size).reshape(num_pages, page_size) % _MOST_TOKENS
    for _ in range(pools):
        drawn = (min(tokens.size, _MOST_TOKENS), *shape)
        pool = normal(rng, drawn, dtype if dtype not in LARGEST else "f4")
        if dtype in LARGEST:
            # Magnitudes differ between heads and tokens, so that a scale read from a wrong slot gives a wrong result.
            pool *= 2.0 ** rng.integers(-3, 2, pool.shape[:-1])[..., None].astype(np.float32)
            pool, scale = quantised(pool, dtype)
            scale = scale[tokens]
            scale[unread] = np.nan
            scales.append(scale)
        # View as integers: NumPy copies dtypes of ml_dtypes element by element.
        bits = pool.view(f"u{pool.itemsize}")[tokens]
        pool = bits.view(pool.dtype)
        pool[unread] = -128 if dtype == "int8" else np.nan
        filled.append(pool)
    return NanFilledPages(page_table=page_table, pools=tuple(filled), scales=tuple(scales))
