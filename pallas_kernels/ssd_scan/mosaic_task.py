"""The table of rows for the `ssd_scan` kernel (XLA), and a block's row, units and pieces (kernel)."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.packed.rows import counts_of
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE


class Row(NamedTuple):
    """The tokens and states of a row.

    Attributes:
        start: index of its first packed token.
        stop: one past its last packed token.
        offset: position of its first token modulo 64.
        first_piece: index of its first piece.
        read: id of its initial state, past the end for zeros.
        write: id of its final state, past the end for none.
        owned: 1; 0 for the padding tokens, which come last and get zeros.
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
) -> Int[Array, "tasks fields"]:
    """Returns the fields of `Row` for each row and for the padding tokens, the longest rows first."""
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    none = jnp.zeros(1, jnp.int32)
    counts = jnp.append(counts_of(cu_q_lens, positions, SIDE), none)
    row = jnp.arange(len(counts), dtype=jnp.int32)
    before = row[None, :] < row[:, None]
    first = jnp.sum(jnp.where(before, counts[None, :], 0), axis=1, dtype=jnp.int32)
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
    return jnp.zeros_like(table).at[rank].set(table, unique_indices=True)


class Task:
    """A block's row and units."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], block: Array) -> None:
        g = self.geometry = kernel.geometry
        packs = g.packs(kernel.schedule.consumers)
        number, pack = lax.div(block, jnp.int32(packs)), lax.rem(block, jnp.int32(packs))
        self.row = Row(*(refs["tasks"][number, field] for field in range(len(Row._fields))))
        self.first_unit = pack * kernel.schedule.consumers
        self.group = lax.div(self.first_unit, jnp.int32(g.units_per_group))
        self.first_piece = self.row.first_piece
        length = self.row.stop - self.row.start
        pieces = lax.div(self.row.offset + length + (SIDE - 1), jnp.int32(SIDE))
        self.pieces = jnp.where((self.row.owned == 1) & (length > 0), pieces, 0)

    def unit(self, consumer: Array | int) -> tuple[Array, Array]:
        """Returns the head of a consumer's unit, and the unit's first column in x."""
        unit = self.first_unit + consumer
        return lax.div(unit, jnp.int32(self.geometry.units_per_head)), unit * SIDE

    def piece(self, number: Array) -> tuple[Array, Array]:
        """Returns a piece's first token and its number of tokens."""
        from_start = number * SIDE - self.row.offset
        start = self.row.start + jnp.maximum(from_start, 0)
        return start, jnp.minimum(self.row.start + from_start + SIDE, self.row.stop) - start


class Worker:
    """Base class of the kernel's warpgroups."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        self.kernel, self.geometry, self.refs = kernel, kernel.geometry, refs

    def slot(self, number: Array) -> Array:
        """Returns the pipeline stage of a piece."""
        return lax.rem(number, jnp.int32(self.kernel.schedule.stages))
