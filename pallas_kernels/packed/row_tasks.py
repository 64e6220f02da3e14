"""The table of rows for the kernels of scans (XLA), and the pieces of a row (kernel)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from pallas_kernels.packed.rows import counts_of


class Row(NamedTuple):
    """The tokens and states of a row.

    Attributes:
        start: index of its first packed token.
        stop: one past its last packed token.
        offset: position of its first token modulo the size of a piece.
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

    def pieces(self, size: int) -> Array:
        """Returns the number of the row's pieces."""
        length = self.stop - self.start
        pieces = lax.div(self.offset + length + (size - 1), jnp.int32(size))
        return jnp.where((self.owned == 1) & (length > 0), pieces, 0)

    def piece(self, number: Array, size: int) -> tuple[Array, Array]:
        """Returns a piece's first token and its number of tokens."""
        from_start = number * size - self.offset
        start = self.start + jnp.maximum(from_start, 0)
        return start, jnp.minimum(self.start + from_start + size, self.stop) - start


def tasks_of(
    cu_q_lens: Int[Array, " row_bounds"],
    positions: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    tokens: int,
    size: int,
) -> Int[Array, "tasks fields"]:
    """Returns the fields of `Row` for each row and for the padding tokens, the longest rows first.

    Args:
        cu_q_lens: row r's tokens are `cu_q_lens[r]:cu_q_lens[r + 1]`.
        positions: position of each row's first token in its sequence.
        read_states: id of each row's initial state.
        write_states: id of each row's final state.
        tokens: number of packed tokens, padding included.
        size: most tokens of a piece.
    """
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    none = jnp.zeros(1, jnp.int32)
    counts = jnp.append(counts_of(cu_q_lens, positions, size), none)
    row = jnp.arange(len(counts), dtype=jnp.int32)
    before = row[None, :] < row[:, None]
    first = jnp.sum(jnp.where(before, counts[None, :], 0), axis=1, dtype=jnp.int32)
    heavier = counts[None, :] > counts[:, None]
    equal = (counts[None, :] == counts[:, None]) & before
    rank = jnp.sum(heavier | equal, axis=1, dtype=jnp.int32)
    fields = Row(
        start=bounds[:-1],
        stop=bounds[1:],
        offset=jnp.append(positions % size, none),
        first_piece=first,
        read=jnp.append(read_states, none),
        write=jnp.append(write_states, none),
        owned=(row < len(read_states)).astype(jnp.int32),
    )
    table = jnp.stack(fields, axis=1)
    return jnp.zeros_like(table).at[rank].set(table, unique_indices=True)
