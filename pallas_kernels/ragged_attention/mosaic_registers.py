"""Shapes of what a warpgroup keeps in registers, where a tile's rows and columns are spread over its threads."""

from jax import Array, lax

from pallas_kernels.ragged_attention.mosaic_schedule import ROW_TILE


def eights(tile: Array) -> list[Array]:
    """Cuts a tile into pieces of 8 columns, which have the same columns in each thread."""
    return [
        lax.slice(tile, (0, start), (tile.shape[0], start + ROW_TILE))
        for start in range(0, tile.shape[1], ROW_TILE)
    ]


def over_columns(vector: Array, columns: int) -> Array:
    """Repeats one value per row over `columns` columns."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def over_rows(vector: Array, rows: int) -> Array:
    """Repeats one value per column over `rows` rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])
