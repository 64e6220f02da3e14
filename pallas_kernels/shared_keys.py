"""`SharedKeys`: which rows of a decode step begin with the same pages."""

from typing import NamedTuple

from jaxtyping import Array, Int

ROWS_PER_TILE = 8
"""Places of a tile of rows."""
SHARED_GRAIN = 64
"""The rows of a tile share a multiple of so many keys."""


class SharedKeys(NamedTuple):
    """Tiles of rows that begin with the same pages, so that an implementation may read these once for a whole tile.

    A hint, which changes no result beyond rounding. Sharing the reads of a common prefix is Hydragen's idea (Juravsky
    et al., arXiv:2402.05099); others call it cascade attention.

    Attributes:
        rows: the row at each place; places `8 * t` to `8 * t + 7` are tile t. A tile's rows are at its first places.
            The others have a number past the last row.
        places: the place of each row; past the last place for a row of no tile.
        lens: number of keys that the rows of each tile share, a multiple of 64 and less than their `seq_lens`; their
            page tables agree so far. 0 for a tile without rows.
    """

    rows: Int[Array, " places"]
    places: Int[Array, " rows"]
    lens: Int[Array, " tiles"]
