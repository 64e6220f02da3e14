"""Test inputs of ops with recurrent states: random state ids, NaN in every state that no row reads. Imports no JAX."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.inputs.nan_filled_pages import normal


@dataclass(frozen=True)
class Rows:
    """Lengths and positions of packed rows, from which the state tables are made.

    Attributes:
        lengths: tokens of each row in this call.
        positions: position of each row's first token; empty for all 0. Rows at 0 read state 0, the zero state.
        padding_rows: additional rows without tokens.
        padding_tokens: tokens after all rows.
        snapshots: whether to snapshot the state at each multiple of the chunk size inside a row, and at the end of
            rows with an odd index.
    """

    lengths: tuple[int, ...]
    positions: tuple[int, ...] = ()
    padding_rows: int = 0
    padding_tokens: int = 0
    snapshots: bool = False

    @property
    def tokens(self) -> int:
        """Number of packed tokens, padding included."""
        return sum(self.lengths) + self.padding_tokens

    def ends(self, chunk_size: int) -> list[int]:
        """Returns the `snapshot_ends`: the number of packed tokens before each snapshot."""
        found, start = [], 0
        positions = self.positions or (0,) * len(self.lengths)
        for row, (length, position) in enumerate(zip(self.lengths, positions, strict=True)):
            stops = range(start + 1, start + length + 1)
            inner = [stop for stop in stops if (position + stop - start) % chunk_size == 0]
            last = [start + length] if row % 2 and length else []
            found += sorted({*inner, *last})
            start += length
        return found if self.snapshots else []

    def tables(
        self, rng: np.random.Generator, chunk_size: int
    ) -> tuple[dict[str, np.ndarray], int]:
        """Returns the tables by name and the number of states in the pool.

        Every second row that continues a sequence updates its state in place; the others write another state.
        """
        positions = self.positions or (0,) * len(self.lengths)
        ends = self.ends(chunk_size)
        rows = len(self.lengths)
        num_states = 1 + 2 * rows + len(ends) + 2
        ids = 1 + rng.permutation(num_states - 1)
        read = np.where(np.asarray(positions) > 0, ids[:rows], 0)
        in_place = (np.asarray(positions) > 0) & (np.arange(rows) % 2 == 0)
        write = np.where(in_place, read, ids[rows : 2 * rows])
        padding = np.arange(self.padding_rows)
        lengths = np.append(np.asarray(self.lengths), np.zeros(self.padding_rows))
        seen = np.append(np.asarray(positions) + np.asarray(self.lengths), np.zeros_like(padding))
        tables = {
            "cu_q_lens": np.append(0, np.cumsum(lengths)),
            "seq_lens": seen,
            "read_states": np.append(read, np.zeros_like(padding)),
            "write_states": np.append(write, num_states + padding),
        }
        if self.snapshots:
            spare = np.arange(2)
            tables["snapshot_ends"] = np.append(ends, self.tokens + 1 + spare)
            kept = ids[2 * rows : 2 * rows + len(ends)]
            tables["snapshot_states"] = np.append(kept, num_states + self.padding_rows + spare)
        return {name: table.astype(np.int32) for name, table in tables.items()}, num_states

    def nan_filled(
        self, values: Float[np.ndarray, "tokens wide"]
    ) -> Float[np.ndarray, "tokens wide"]:
        """Returns `values` with NaN in the padding tokens."""
        values[sum(self.lengths) :] = np.nan
        return values


def nan_filled_pool(
    rng: np.random.Generator,
    read_states: Int[np.ndarray, " rows"],
    num_states: int,
    shape: tuple[int, ...],
    dtype: str,
    scale: float = 1.0,
) -> Float[np.ndarray, "states ..."]:
    """Returns a pool: normal values times `scale` in the states that are read, zeros in state 0, NaN elsewhere."""
    pool = np.full((num_states, *shape), np.nan, np.dtype(dtype))
    used = np.unique(read_states[read_states < num_states])
    drawn = normal(rng, (len(used), *shape), "float32") * np.float32(scale)
    pool[used] = drawn.astype(pool.dtype)
    pool[0] = 0
    return pool
