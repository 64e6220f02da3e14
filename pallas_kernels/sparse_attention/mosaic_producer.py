"""Producer warpgroup of the `sparse_attention` kernel: it gathers the selected records into tiles."""

from collections.abc import Mapping

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.latent_records import GROUP, record_bytes
from pallas_kernels.latent_kernel.kernel import Kernel
from pallas_kernels.latent_kernel.pieces import Piece, fetch_queries
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE, Geometry
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.sparse_attention.mosaic_records import (
    TURNS,
    Place,
    Rows,
    copy,
    decode_plainly,
    gather_plainly,
    load,
    prefetch,
    store,
    wait_for_copies,
)


def places_of(geometry: Geometry, *, packed: bool) -> dict[str, Place]:
    """Returns the place in a record of each part of a tile; `packed` means uint8 records."""
    half, value_dim = geometry.half, geometry.value_dim
    if not packed:
        starts = {"lo": 0, "hi": half, "rope": value_dim}
        columns = {"lo": half, "hi": half, "rope": COLUMN_TILE}
        return {part: Place(2 * start, columns[part]) for part, start in starts.items()}
    return {
        "lo": Place(0, half, value_dim),
        "hi": Place(half, half, value_dim + 4 * (half // GROUP)),
        "rope": Place(record_bytes(value_dim, 0), COLUMN_TILE),
    }


class Gatherer:
    """The producer warpgroup; it gathers half a tile at a time.

    Loads of bytes into registers are issued before the half is free. Rows past the token's count become zeros, because
    0 * NaN is NaN.
    """

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece
        self.packed = refs["records"].dtype == jnp.uint8
        self.places = places_of(kernel.geometry, packed=self.packed)

    def run(self) -> None:
        """Fetches the queries and the share's tiles."""
        self.fetch_queries()
        start, stop = SLOTS * self.piece.start, SLOTS * self.piece.stop

        @pl.loop(start, stop)
        def _(tile: Array) -> None:
            self.prefetch(tile + 1, stop)
            rows, slot = self.rows(tile), tile % SLOTS
            for half in ("lo", "hi"):
                self.fill(half, rows, slot)
                self.signal(half, slot)

        if self.kernel.interpret:
            for half in ("lo", "hi"):
                self.drain(half)

    def fetch_queries(self) -> None:
        """Starts the copy of the block's rows of queries."""
        fetch_queries(self.geometry, self.refs, self.piece, interpret=self.kernel.interpret)

    def start(self, half: str, tile: Array, slot: int) -> None:
        """Gathers one half of a tile, for a consumer of a kernel without a producer warpgroup."""
        if half == "lo":
            self.prefetch(tile + SLOTS, SLOTS * self.piece.stop)
        self.fill(half, self.rows(tile), slot)

    def finish(self, half: str, tile: Array, slot: int, *, masked: bool) -> None:
        """Waits for the copies of a half that `start` has gathered."""
        del tile, masked
        self.signal(half, slot)

    def drain(self, half: str) -> None:
        """Waits until a half is released; the interpreter requires a wait for each completion of a barrier."""
        for slot in range(SLOTS):
            plgpu.barrier_wait(self.refs[f"{half}_free"].at[slot])

    def prefetch(self, tile: Array, stop: Array) -> None:
        """Prefetches a tile's records to L2; from tile `stop` on, those of the last tile before it."""
        if not self.kernel.interpret:
            size = self.refs["records"].shape[-1] * self.refs["records"].dtype.itemsize
            prefetch(self.rows(jnp.minimum(tile, stop - 1)), record_bytes=size)

    def rows(self, tile: Array) -> Rows:
        """Returns the records of a tile."""
        refs, piece = self.refs, self.piece
        return Rows(refs["records"], refs["slots"], piece.row, tile * TILE, piece.keys)

    def fill(self, half: str, rows: Rows, slot: Array | int) -> None:
        """Writes the parts of one half of a tile once the half is free; copies are in flight afterwards."""
        parts = (half,) if half == "lo" else (half, "rope")
        refs, dtype, interpret = self.refs, self.geometry.dtype, self.kernel.interpret
        chosen = gather_plainly(rows) if interpret else None
        first = self.places[half]
        # A consumer has registers for the words of half the turns.
        turns = range(TURNS if self.kernel.has_producer else TURNS // 2)
        words = None if interpret or first.scales is None else load(rows, first, turns)
        plgpu.barrier_wait(refs[f"{half}_free"].at[slot])
        for part in reversed(parts):
            tile, place = refs[part].at[slot], self.places[part]
            if chosen is not None:
                assign(tile, ..., decode_plainly(chosen, place, dtype))
            elif words is not None and place.scales is not None:
                store(words, tile, place, dtype, turns)
                rest = range(len(turns), TURNS)
                if rest:
                    store(load(rows, place, rest), tile, place, dtype, rest)
            else:
                copy(rows, tile, place, dtype)

    def signal(self, half: str, slot: Array | int) -> None:
        """Waits for the copies and signals the consumers."""
        if not self.kernel.interpret:
            wait_for_copies()
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs[f"{half}_arrived"].at[slot])
