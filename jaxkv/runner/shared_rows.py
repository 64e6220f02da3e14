"""Finds rows of a decode step that begin with the same pages, so that attention reads these once for several rows.

Samples of one prompt share all of its full pages, and requests with one system prompt those of the system prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pallas_kernels.shared_keys import ROWS_PER_TILE, SHARED_GRAIN

FEWEST_SHARING = 4
"""Fewest rows of a group that shares reads."""
FEWEST_PROGRAM_ROWS = 64
"""Rows of the smallest program that reads shared keys once: rows to spare cost little beside what is saved."""
_LEAST_BYTES_SAVED = 2**28
"""Bytes of keys and values whose reads each layer must save: 31 to 62 us on an H200, depending on where they lie.

The kernel that reads shared keys is a launch more per layer, and the step may run in a larger program.
"""
_LEAST_PART_SAVED = 0.25
"""Least part of all reads of keys that is saved."""
_LEAST_PART_SAVED_OF_FEW = 0.5
"""The same of steps with fewer rows than the program, which reads their other keys with fewer blocks for each row."""
_MOST_LEVELS = 8
"""Most groups within one another that are looked at."""


class Prefix(NamedTuple):
    """Rows that begin with the same tokens.

    Attributes:
        rows: the rows, at least `FEWEST_SHARING`.
        length: the tokens, a multiple of `SHARED_GRAIN` that fills pages.
    """

    rows: list[int]
    length: int

    @property
    def saved(self) -> int:
        """Reads of tokens that are saved: a tile of rows reads them once."""
        return (len(self.rows) - -(-len(self.rows) // ROWS_PER_TILE)) * self.length


class SharedRows(NamedTuple):
    """The tiles of a step; places `8 * t` to `8 * t + 7` are tile t.

    Attributes:
        rows: the rows that are in a tile, int32.
        places: the place of each of them, int32. A tile's rows are at its first places.
        lens: tokens that the rows of each tile share, int32.
    """

    rows: np.ndarray
    places: np.ndarray
    lens: np.ndarray


def find_shared(
    pages: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    page_size: int,
    token_bytes: int,
) -> SharedRows | None:
    """Returns the tiles of rows that share pages; `None` if too little would be saved.

    Args:
        pages: the page ids of each row, in order.
        lengths: the tokens that each row may share: those before the first one that this step or a later one writes.
        page_size: tokens per page.
        token_bytes: bytes of a token's keys and values in one layer.
    """
    if len(pages) < FEWEST_SHARING:
        return None
    full = [length // page_size for length in lengths]
    prefixes = _prefixes(list(range(len(pages))), 0, pages, full, page_size, _MOST_LEVELS)
    saved = sum(prefix.saved for prefix in prefixes)
    is_few = len(pages) < FEWEST_PROGRAM_ROWS
    part = _LEAST_PART_SAVED_OF_FEW if is_few else _LEAST_PART_SAVED
    if not saved or saved * token_bytes < _LEAST_BYTES_SAVED or saved < part * sum(lengths):
        return None
    rows: list[int] = []
    places: list[int] = []
    lens: list[int] = []
    for prefix in prefixes:
        for start in range(0, len(prefix.rows), ROWS_PER_TILE):
            tile = prefix.rows[start : start + ROWS_PER_TILE]
            first = ROWS_PER_TILE * len(lens)
            rows += tile
            places += range(first, first + len(tile))
            lens.append(prefix.length)
    return SharedRows(*(np.asarray(column, np.int32) for column in (rows, places, lens)))


def may_save(rows: int, length: int, token_bytes: int) -> bool:
    """Returns whether `find_shared` can find tiles among at most so many rows of at most so many tokens."""
    return rows >= FEWEST_SHARING and (
        Prefix(list(range(rows)), length).saved * token_bytes >= _LEAST_BYTES_SAVED
    )


def _prefixes(
    rows: list[int],
    common: int,
    pages: Sequence[Sequence[int]],
    full: Sequence[int],
    page_size: int,
    levels: int,
) -> list[Prefix]:
    """Returns prefixes of some rows, each row in one of them at most.

    Either all rows share what they have in common, or smaller groups share more and the other rows that, whichever
    saves more reads.

    Args:
        rows: the rows, at least `FEWEST_SHARING`.
        common: number of pages in which they are known to agree.
        pages: the page ids of each row.
        full: number of pages that each row may share.
        page_size: tokens per page.
        levels: most groups within one another, these rows included.
    """
    first = pages[rows[0]]
    agree = min([full[row] for row in rows])
    for row in rows:
        if pages[row][common:agree] != first[common:agree]:
            both = zip(pages[row], first, strict=False)
            agree = next(index for index, (page, other) in enumerate(both) if page != other)
    common = agree
    branches: dict[int, list[int]] = {}
    for row in rows:
        if common < full[row]:
            branches.setdefault(pages[row][common], []).append(row)
    longer = [
        prefix
        for branch in branches.values()
        if len(branch) >= FEWEST_SHARING and levels > 1
        for prefix in _prefixes(branch, common + 1, pages, full, page_size, levels - 1)
    ]
    length = common * page_size // SHARED_GRAIN * SHARED_GRAIN
    in_longer = {row for prefix in longer for row in prefix.rows}
    rest = Prefix([row for row in rows if row not in in_longer], length)
    if length and len(rest.rows) >= FEWEST_SHARING:
        longer.append(rest)
    whole = Prefix(rows, length)
    return [whole] if whole.saved > sum(prefix.saved for prefix in longer) else longer
