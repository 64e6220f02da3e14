"""Inputs for the cases of paged ops: shuffled pages whose unused places hold NaN. Knows no op. Host only."""

from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - registers bfloat16 and float8 with NumPy
import numpy as np
from jaxtyping import Int, Shaped


@dataclass(frozen=True)
class PoisonedPages:
    """Pools in which only the places that some row may read hold numbers.

    Attributes:
        page_table: ids of each row's pages in order, padded with ids of other pages, in use or not.
        pools: one pool per value kept for a token.
    """

    page_table: Int[np.ndarray, "rows table_width"]
    pools: tuple[Shaped[np.ndarray, "pages page_size ..."], ...]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draws standard normal numbers, rounded to `dtype`."""
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def poisoned_pages(
    rng: np.random.Generator,
    readable: list[tuple[int, int]],
    *,
    shape: tuple[int, ...],
    pools: int,
    page_size: int,
    table_width: int | None,
    dtype: str,
    spare_pages: int = 3,
) -> PoisonedPages:
    """Gives each row random pages and fills the positions `[start, stop)` that it may read.

    Args:
        rng: source of all randomness.
        readable: the first position that the row may read and the position after its last one.
        shape: what one token keeps in a pool.
        pools: number of pools.
        page_size: tokens per page.
        table_width: columns of the page table; `None` for as many as the longest row needs.
        dtype: of the pools; floating.
        spare_pages: pages that no row owns.
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
    filled = []
    for _ in range(pools):
        pool = normal(rng, (num_pages, page_size, *shape), dtype)
        pool[unread] = np.nan
        filled.append(pool)
    return PoisonedPages(page_table=page_table, pools=tuple(filled))
