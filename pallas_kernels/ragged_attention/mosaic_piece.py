"""Pieces of work of the `ragged_attention` kernel, and the way of a block's warpgroups through them.

A piece is one tile of tokens and one pack of heads; a share is what one of the two consumers has of it.
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
    """Divides, rounding down, a number that may be negative only if the divisor is a power of two."""
    if divisor & (divisor - 1):
        return lax.div(number, jnp.int32(divisor))
    return lax.shift_right_arithmetic(number, jnp.int32(divisor.bit_length() - 1))


def remainder(number: Array, divisor: int) -> Array:
    """Returns what `quotient` leaves."""
    if divisor & (divisor - 1):
        return lax.rem(number, jnp.int32(divisor))
    return number & (divisor - 1)


class Piece:
    """One tile of tokens and one pack of heads, and the tiles of keys to visit for it."""

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
    """What the three warpgroups share: the way through the pieces."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        self.kernel, self.refs = kernel, refs
        self.geometry, self.options = kernel.geometry, kernel.options
        self.schedule = kernel.schedule

    def visit_pieces(self, visit: Callable[[Piece, Array, Array], None]) -> None:
        """Visits this block's pieces; tells each how many tiles of keys and of queries came before it.

        A round goes through the blocks in one direction and the next one back, so that no block always gets the
        heavier piece.
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
        """Returns the barriers at which consumers tell the producer that a slot is free; at first all are."""
        stages, queries = self.schedule.stages, self.schedule.query_slots
        counts = {"q_free": queries, "k_free": stages, "v_free": stages}
        return [self.refs[name].at[slot] for name, count in counts.items() for slot in range(count)]

    def slot(self, count: Array) -> Array:
        """Returns where a tile of keys is put that comes after `count` others."""
        return remainder(count, self.schedule.stages)

    def query_slot(self, count: Array) -> Array:
        """Returns where a tile of queries is put that comes after `count` others."""
        return remainder(count, self.schedule.query_slots)


class Share:
    """A consumer's part of a piece: its tokens, and the tiles of keys that they see."""

    def __init__(self, piece: Piece, consumer: Array, worker: Worker) -> None:
        geometry, keys, window = worker.geometry, worker.schedule.keys, worker.options.window
        tile, tokens = piece.tile, geometry.tokens_per_consumer
        self.token = tile.token + consumer * tokens
        self.position = tile.position + consumer * tokens
        # Tokens from `start` to before `stop`, counted from `token`, are queries of the row.
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
        """Returns the bounds of runs of tiles after the first, each with whether some row does not see all of it."""
        keys, window = worker.schedule.keys, worker.options.window
        start, stop = self.first_tile + 1, self.stop_tile
        if window is not None and (window <= 4 * keys or worker.geometry.head_dim == 256):
            # Few tiles would be seen in full; and wide heads leave no registers for more loops.
            return [(start, stop, True)]
        clear = start
        if window is not None:
            clear = jnp.clip(quotient(stop_position - 1 - window + keys, keys), start, stop)
        hidden = jnp.clip(quotient(first_position + 1, keys), clear, stop)
        before = [] if window is None else [(start, clear, True)]
        return [*before, (clear, hidden, False), (hidden, stop, True)]
