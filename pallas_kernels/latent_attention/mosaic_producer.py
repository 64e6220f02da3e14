"""Producer warpgroup of the `latent_attention` kernel: it issues all TMA copies and zeroes hidden values."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_kernel.kernel import Kernel
from pallas_kernels.latent_kernel.pieces import Piece, fetch_queries
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps


class Producer:
    """The producer warpgroup."""

    def __init__(self, kernel: Kernel | KeysKernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece

    def run(self) -> None:
        """Fetches the queries and the share's tiles."""
        interpret = self.kernel.interpret
        self.fetch_queries()

        @pl.loop(SLOTS * self.piece.start, SLOTS * self.piece.stop)
        def _(tile: Array) -> None:
            slot = tile % SLOTS
            at_edge = (tile + 1) * TILE > self.piece.keys
            fetch = partial(self.fetch, **self.places(tile, slot, at_edge))
            on_warps(
                partial(fetch, "lo", "lo"), partial(fetch, "hi", "hi", "rope"), interpret=interpret
            )

            @pl.when(at_edge)
            def _() -> None:
                for half in ("lo", "hi"):
                    self.clear(half, tile, slot)

        if interpret:
            # The interpreter requires a wait for each completion of a barrier.
            on_warps(partial(self.drain, "lo"), partial(self.drain, "hi"), interpret=interpret)

    def fetch_queries(self) -> None:
        """Starts the copy of the block's rows of queries."""
        fetch_queries(self.geometry, self.refs, self.piece, interpret=self.kernel.interpret)

    def start(self, half: str, tile: Array, slot: int) -> None:
        """Starts the copies of one half of a tile, for a consumer of a kernel without a producer warpgroup."""
        at_edge = (tile + 1) * TILE > self.piece.keys
        parts = ("lo",) if half == "lo" else ("hi", "rope")
        fetch = partial(self.fetch, half, *parts, **self.places(tile, slot, at_edge))
        on_warps(fetch, interpret=self.kernel.interpret)

    def finish(self, half: str, tile: Array, slot: int, *, masked: bool) -> None:
        """Zeroes the hidden values of a half that `start` fetched; tiles that are not masked have none."""
        if masked:
            pl.when((tile + 1) * TILE > self.piece.keys)(partial(self.clear, half, tile, slot))

    def places(self, tile: Array, slot: Array | int, at_edge: Array) -> dict[str, Any]:
        """Returns the source and the target of a tile's copies, and the barrier that they signal."""
        # Values with hidden rows signal one of the last barriers; the rows are zeroed first.
        arrived = jnp.where(at_edge, self.edge(slot), slot)
        pages = self.pages(tile)
        return {"slot": slot, "arrived": arrived, "pages": pages, "offset": self.offset(tile)}

    def edge(self, slot: Array | int) -> Array | int:
        """Returns the index of the barrier of a stage's half before its hidden rows are zeroed."""
        return SLOTS if self.kernel.has_producer else SLOTS + slot

    def drain(self, half: str) -> None:
        """Waits until all stages of a half are released."""
        for slot in range(SLOTS):
            plgpu.barrier_wait(self.refs[f"{half}_free"].at[slot])

    def pages(self, tile: Array) -> tuple[Array, ...]:
        """Returns the page ids of one tile; pages past the row's last page are replaced by the last one."""
        page_size = self.geometry.page_size
        last = (self.piece.keys - 1) // page_size
        entries = [tile * TILE // page_size + copy for copy in range(self.geometry.copies_per_tile)]
        return tuple(
            self.refs["page_table"][self.piece.row, jnp.minimum(entry, last)] for entry in entries
        )

    def offset(self, tile: Array) -> Array | int:
        """Returns the offset in its page at which a tile starts."""
        page_size = self.geometry.page_size
        return pl.multiple_of(tile * TILE % page_size, TILE) if page_size > TILE else 0

    def fetch(
        self,
        half: str,
        *parts: str,
        slot: Array | int,
        arrived: Array,
        pages: tuple[Array, ...],
        offset: Array | int,
    ) -> None:
        """Starts the copies of the parts of one half of a tile once that half's stage is free."""
        refs, height = self.refs, min(self.geometry.page_size, TILE)
        plgpu.barrier_wait(refs[f"{half}_free"].at[slot])
        for copy, page in enumerate(pages):
            for part in parts:
                columns = pl.ds(*self.columns(part))
                plgpu.copy_gmem_to_smem(
                    refs["latent_pages"].at[page, pl.ds(offset, height), 0, columns],
                    refs[part].at[slot, pl.ds(copy * height, height)],
                    refs[f"{half}_arrived"].at[arrived],
                )

    def columns(self, part: str) -> tuple[int, int]:
        """Returns the first column and the number of columns of a part of the latents."""
        g = self.geometry
        return {"lo": (0, g.half), "hi": (g.half, g.half), "rope": (g.value_dim, COLUMN_TILE)}[part]

    def clear(self, half: str, tile: Array, slot: Array | int) -> None:
        """Zeroes hidden values of a half, because 0 * NaN is NaN, and then signals the consumers."""
        arrived, arrivals = self.refs[f"{half}_arrived"], 1 if half == "lo" else 2
        plgpu.barrier_wait(arrived.at[self.edge(slot)])

        @pl.loop(0, self.geometry.half // COLUMN_TILE)
        def _(piece: Array) -> None:
            column = pl.multiple_of(piece * COLUMN_TILE, COLUMN_TILE)
            values = self.refs[half].at[slot, :, pl.ds(column, COLUMN_TILE)]
            loaded = plgpu.load(values, layout=WGMMA)
            position = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=WGMMA)
            seen = position + tile * TILE < self.piece.keys
            assign(values, ..., jnp.where(seen, loaded, jnp.zeros_like(loaded)))

        plgpu.commit_smem()
        for _arrival in range(arrivals * self.geometry.copies_per_tile):
            plgpu.barrier_arrive(arrived.at[slot])
