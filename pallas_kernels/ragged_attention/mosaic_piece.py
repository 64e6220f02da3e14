"""Pieces of work of the `ragged_attention` kernel, and the loop of a block's warpgroups over them.

A piece is one tile of tokens and one pack of heads. A share is one consumer's half of a piece.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.ragged_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_attention.mosaic_tiles import Tile


def quotient(number: Array, divisor: int) -> Array:
    """Returns the floor of `number / divisor`; `number` may be negative only if the divisor is a power of two."""
    if divisor & (divisor - 1):
        return lax.div(number, jnp.int32(divisor))
    return lax.shift_right_arithmetic(number, jnp.int32(divisor.bit_length() - 1))


def remainder(number: Array, divisor: int) -> Array:
    """Returns the remainder that belongs to `quotient`."""
    if divisor & (divisor - 1):
        return lax.rem(number, jnp.int32(divisor))
    return number & (divisor - 1)


class Piece:
    """One tile of tokens and one pack of heads, and the range [first, stop) of its tiles of keys."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        geometry, keys = kernel.geometry, kernel.schedule.keys
        total = refs["num_tiles"][0] * geometry.units
        self.exists = number < total
        self.number = number
        number = jnp.minimum(number, total - 1)
        self.unit = remainder(number, geometry.units)
        self.head = self.unit * geometry.pack
        self.kv_head = quotient(self.head, geometry.heads // geometry.kv_heads)
        index = quotient(number, geometry.units)
        tile = Tile(*(refs["tiles"][index, field] for field in range(len(Tile._fields))))
        self.tile = tile._replace(token=pl.multiple_of(tile.token, ROW_TILE))
        stop_key = tile.position + tile.stop - tile.token
        start_key = jnp.int32(0)
        if kernel.options.window is not None:
            start_key = tile.position + tile.start - tile.token + 1 - kernel.options.window
        self.first = quotient(jnp.maximum(start_key, 0), keys)
        self.stop = quotient(jnp.maximum(stop_key + keys - 1, 0), keys)
        self.stop = jnp.where(self.exists, jnp.maximum(self.stop, self.first), self.first)


class Worker:
    """Base class of the three warpgroups: the loop over pieces and the indices of pipeline stages."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        self.kernel, self.refs = kernel, refs
        self.geometry, self.options = kernel.geometry, kernel.options
        self.schedule = kernel.schedule

    def visit_pieces(self, visit: Callable[[Piece, Array, Array], None]) -> None:
        """Calls `visit(piece, keys_before, queries_before)` for each piece of this block.

        The counts are the tiles of keys and of queries that the block's pipelines have processed before. Successive
        rounds assign pieces to blocks in alternating direction, so that no block always gets the longer piece.
        """
        blocks = self.kernel.blocks
        total = self.refs["num_tiles"][0] * self.geometry.units
        block, none = lax.axis_index("block"), jnp.int32(0)
        if blocks == self.kernel.pieces:
            visit(Piece(self.kernel, self.refs, block), none, none)
            return

        def visit_one(turn: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
            place = jnp.where(turn & 1 == 0, block, blocks - 1 - block)
            piece = Piece(self.kernel, self.refs, turn * blocks + place)
            visit(piece, *before)
            keys_before, queries_before = before
            return (
                keys_before + piece.stop - piece.first,
                queries_before + piece.exists.astype(jnp.int32),
            )

        lax.fori_loop(0, pl.cdiv(total, blocks), visit_one, (none, none))

    def free_barriers(self) -> list[Ref]:
        """Returns the barriers on which consumers signal to the producer that a stage is free; initially all are."""
        stages, queries = self.schedule.stages, self.schedule.query_slots
        counts = {"q_free": queries, "k_free": stages, "v_free": stages}
        return [self.refs[name].at[slot] for name, count in counts.items() for slot in range(count)]

    def slot(self, count: Array) -> Array:
        """Returns the pipeline stage of a tile of keys that comes after `count` others."""
        return remainder(count, self.schedule.stages)

    def query_slot(self, count: Array) -> Array:
        """Returns the pipeline stage of a tile of queries that comes after `count` others."""
        return remainder(count, self.schedule.query_slots)


class Share:
    """A consumer's half of a piece: its tokens, and the range of key tiles that they see."""

    def __init__(self, piece: Piece, consumer: Array, worker: Worker) -> None:
        geometry, keys, window = worker.geometry, worker.schedule.keys, worker.options.window
        tile, tokens = piece.tile, geometry.tokens_per_consumer
        self.token = tile.token + consumer * tokens
        self.position = tile.position + consumer * tokens
        # The tokens [start, stop), counted from `token`, are queries of the row.
        self.start = jnp.clip(tile.start - self.token, 0, tokens)
        self.stop = jnp.clip(tile.stop - self.token, 0, tokens)
        first_position = self.position + self.start
        stop_position = jnp.where(self.stop > self.start, self.position + self.stop, 0)
        stop = quotient(stop_position + keys - 1, keys)
        self.stop_tile = jnp.clip(stop, piece.first, piece.stop)
        self.first_tile = piece.first
        if window is not None:
            first = quotient(first_position + 1 - window, keys)
            self.first_tile = jnp.clip(first, piece.first, self.stop_tile)
        self.sees = self.stop_tile > self.first_tile
        self.loops = partial(self._loops, first_position, stop_position, worker)

    def _loops(
        self, first_position: Array, stop_position: Array, worker: Worker
    ) -> list[tuple[Array, Array, bool]]:
        """Returns the runs (start, stop, masked) of tiles after the first; masked runs are seen in part."""
        keys, window = worker.schedule.keys, worker.options.window
        start, stop = self.first_tile + 1, self.stop_tile
        if window is not None and (window <= 4 * keys or worker.geometry.head_dim == 256):
            # Few tiles would be unmasked, and heads of 256 leave no registers for more loops.
            return [(start, stop, True)]
        clear = start
        if window is not None:
            clear = jnp.clip(quotient(stop_position - 1 - window + keys, keys), start, stop)
        hidden = jnp.clip(quotient(first_position + 1, keys), clear, stop)
        before = [] if window is None else [(start, clear, True)]
        return [*before, (clear, hidden, False), (hidden, stop, True)]
