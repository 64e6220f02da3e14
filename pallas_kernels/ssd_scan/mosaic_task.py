"""What the warpgroups of the `ssd_scan` kernel share: a block's row and units, and the way through its pieces."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from pallas_kernels.packed_rows import counts_of
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE

if TYPE_CHECKING:
    from pallas_kernels.ssd_scan.mosaic_block import Kernel

# Refs have types that are private to JAX.
Ref = Any


class Row(NamedTuple):
    """Where a row's tokens and states are.

    Attributes:
        start: its first packed token.
        stop: the packed token after its last one.
        offset: how far behind a multiple of 64 its first token is.
        first_piece: the number of its first piece.
        read: the state that it starts from, past the end for zeros.
        write: the state that it ends in, past the end for none.
        owned: 1; 0 for the tokens of no row, which come last and get zeros.
    """

    start: Array
    stop: Array
    offset: Array
    first_piece: Array
    read: Array
    write: Array
    owned: Array


def tasks_of(
    cu_q_lens: Int[Array, " row_bounds"],
    positions: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    tokens: int,
) -> tuple[Int[Array, "tasks fields"], Int[Array, "1"]]:
    """Returns the fields of `Row` for each row and for the tokens of no row, and how many of these have tokens.

    The longest come first, so that none is left over at the end, and those without tokens last.
    """
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    none = jnp.zeros(1, jnp.int32)
    unowned = (tokens - cu_q_lens[-1:] + (SIDE - 1)) // SIDE
    owned = counts_of(cu_q_lens, positions, SIDE)
    counts = jnp.append(owned, unowned)
    row = jnp.arange(len(counts), dtype=jnp.int32)
    before = row[None, :] < row[:, None]
    first = jnp.sum(jnp.where(before, counts[None, :], 0), axis=1, dtype=jnp.int32)
    real = jnp.sum(counts > 0, dtype=jnp.int32)[None]
    heavier = counts[None, :] > counts[:, None]
    equal = (counts[None, :] == counts[:, None]) & before
    rank = jnp.sum(heavier | equal, axis=1, dtype=jnp.int32)
    fields = Row(
        start=bounds[:-1],
        stop=bounds[1:],
        offset=jnp.append(positions % SIDE, none),
        first_piece=first,
        read=jnp.append(read_states, none),
        write=jnp.append(write_states, none),
        owned=(row < len(read_states)).astype(jnp.int32),
    )
    table = jnp.stack(fields, axis=1)
    return jnp.zeros_like(table).at[rank].set(table, unique_indices=True), real


class Task:
    """A row and some units."""

    def __init__(self, kernel: "Kernel", refs: Mapping[str, Ref], number: Array) -> None:
        g, packs = kernel.geometry, jnp.int32(kernel.packs)
        self.geometry = g
        number, pack = lax.div(number, packs), lax.rem(number, packs)
        self.row = Row(*(refs["tasks"][number, field] for field in range(len(Row._fields))))
        self.first_unit = pack * kernel.schedule.consumers
        self.group = lax.div(self.first_unit, jnp.int32(g.units_per_group))
        self.first_piece = self.row.first_piece
        length = self.row.stop - self.row.start
        pieces = lax.div(self.row.offset + length + (SIDE - 1), jnp.int32(SIDE))
        self.pieces = jnp.where(self.row.owned == 1, pieces, 0)

    def unit(self, consumer: Array | int) -> tuple[Array, Array]:
        """Returns the head of a consumer's unit, and the unit's first column in x."""
        unit = self.first_unit + consumer
        return lax.div(unit, jnp.int32(self.geometry.units_per_head)), unit * SIDE

    def piece(self, number: Array) -> tuple[Array, Array]:
        """Returns a piece's first token and its tokens."""
        from_start = number * SIDE - self.row.offset
        start = self.row.start + jnp.maximum(from_start, 0)
        return start, jnp.minimum(self.row.start + from_start + SIDE, self.row.stop) - start


class Worker:
    """A warpgroup of the kernel."""

    def __init__(self, kernel: "Kernel", refs: Mapping[str, Ref]) -> None:
        self.kernel, self.geometry, self.refs = kernel, kernel.geometry, refs

    def visit_task(self, visit: Callable[[Task], None]) -> None:
        """Visits this block's task, unless its row has no tokens; those come last."""
        kernel, block = self.kernel, lax.axis_index("block")
        total = self.refs["num_tasks"][0] * kernel.packs
        pl.when(block < total)(lambda: visit(Task(kernel, self.refs, block)))

    def slot(self, number: Array) -> Array:
        """Returns where a piece is put."""
        return lax.rem(number, jnp.int32(self.kernel.schedule.stages))
