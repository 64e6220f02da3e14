"""Cuts packed queries into tiles for the Mosaic GPU kernel and orders them for load balance, in plain XLA.

The result depends on lengths alone, so a step computes it once for all layers.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.device import ROW_TILE


class Tile(NamedTuple):
    """A run of consecutive tokens, of which [start, stop) are queries of one row.

    Attributes:
        row: row of the page table; the last row for padding tokens.
        token: the first token, a multiple of 8; at most `start`.
        start: the row's first query in the tile.
        stop: one past the row's last query in the tile.
        position: position of `token` in the row's sequence, extrapolated if `token` is before the row.
        seq_len: number of keys of the row; 0 for padding tokens.
        first_key: the first key of the row that any of its queries sees.
        place: index of the tile in the order of tokens.
    """

    row: Array
    token: Array
    start: Array
    stop: Array
    position: Array
    seq_len: Array
    first_key: Array
    place: Array


class Runs(NamedTuple):
    """Runs of tokens [start, stop) and their tiles: one run per row, then one of the padding tokens."""

    start: Int[Array, " runs"]
    stop: Int[Array, " runs"]
    first_tile: Int[Array, " runs"]
    tiles: Int[Array, " runs"]


def runs_of(cu_q_lens: Int[Array, " row_bounds"], tokens: int, tokens_per_tile: int) -> Runs:
    """Returns the runs, each with its number of tiles and the index of its first tile."""
    start = cu_q_lens
    stop = jnp.concatenate([cu_q_lens[1:], jnp.full(1, tokens, jnp.int32)])
    aligned = start // ROW_TILE * ROW_TILE
    tiles = jnp.where(stop > start, (stop - aligned + tokens_per_tile - 1) // tokens_per_tile, 0)
    run = jnp.arange(start.shape[0], dtype=jnp.int32)
    before = run[None, :] < run[:, None]
    first_tile = jnp.sum(jnp.where(before, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    return Runs(start, stop, first_tile, tiles)


def cut(
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    tokens: int,
    tokens_per_tile: int,
    num_tiles: int,
    keys: int,
    window: int | None,
) -> tuple[Int[Array, "num_tiles fields"], Int[Array, "1"]]:
    """Returns the tiles in the order of execution, and their number.

    Tiles with the most keys come first, up to a factor of two, so that no long tile remains at the end. Within that
    factor they are in row order, since a row's tiles read the same keys.
    """
    runs = runs_of(cu_q_lens, tokens, tokens_per_tile)
    place = jnp.arange(num_tiles, dtype=jnp.int32)
    run = jnp.sum(
        (runs.first_tile + runs.tiles)[None, :] <= place[:, None], axis=1, dtype=jnp.int32
    )
    rows = seq_lens.shape[0]
    real = run <= rows
    run = jnp.minimum(run, rows)
    tile = _describe(run, place, runs, seq_lens, tokens_per_tile, window)
    stop_key = tile.position + tile.stop - tile.token
    start_key = 0 if window is None else tile.position + tile.start - tile.token + 1 - window
    weight = jnp.maximum(stop_key - jnp.maximum(start_key, 0), 0) // keys
    lightness = 32 - jnp.sum(
        weight[:, None] >> jnp.arange(31, dtype=jnp.int32)[None, :] > 0, axis=1, dtype=jnp.int32
    )
    from_end = 2 * runs.first_tile[run] + runs.tiles[run] - 1 - place
    rank = jnp.where(real, lightness * num_tiles + from_end, 33 * num_tiles + place)
    order = jnp.sum(rank[None, :] < rank[:, None], axis=1, dtype=jnp.int32)
    fields = jnp.stack(tile, axis=1)
    fields = jnp.zeros_like(fields).at[order].set(fields, unique_indices=True, mode="drop")
    return fields, jnp.sum(runs.tiles, dtype=jnp.int32)[None]


def _describe(
    run: Array,
    place: Array,
    runs: Runs,
    seq_lens: Array,
    tokens_per_tile: int,
    window: int | None,
) -> Tile:
    start, stop = runs.start[run], runs.stop[run]
    seq_len = jnp.concatenate([seq_lens, jnp.zeros(1, jnp.int32)])[run]
    token = start // ROW_TILE * ROW_TILE + (place - runs.first_tile[run]) * tokens_per_tile
    first_position = seq_len - (stop - start)
    first_key = jnp.zeros_like(start) if window is None else first_position + 1 - window
    return Tile(
        row=jnp.minimum(run, seq_lens.shape[0] - 1),
        token=token,
        start=jnp.maximum(start, token),
        stop=jnp.minimum(stop, token + tokens_per_tile),
        position=first_position + token - start,
        seq_len=seq_len,
        first_key=jnp.maximum(first_key, 0),
        place=place,
    )


def lse_of_tokens(
    lse: Float[Array, "num_tiles units consumers height"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    tokens: int,
    tokens_per_tile: int,
    pack: int,
) -> Float[Array, "tokens heads"]:
    """Returns the kernel's log-sum-exps, which are in the order of tiles, in the order of tokens and heads."""
    num_tiles, units, consumers, height = lse.shape
    runs = runs_of(cu_q_lens, tokens, tokens_per_tile)
    token = jnp.arange(tokens, dtype=jnp.int32)
    run = jnp.sum(runs.stop[None, :] <= token[:, None], axis=1, dtype=jnp.int32)
    place = runs.first_tile[run] * tokens_per_tile + token - runs.start[run] // ROW_TILE * ROW_TILE
    by_token = lse.reshape(num_tiles, units, consumers, pack, height // pack)
    by_token = jnp.transpose(by_token, (0, 2, 4, 1, 3)).reshape(-1, units * pack)
    return by_token.at[place].get(mode="clip", wrap_negative_indices=False)
