"""Epilogue of the `latent_attention` kernel: normalisation, combination of a cluster's shares, and output."""

from collections.abc import Mapping
from functools import partial, reduce

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.latent_kernel.kernel import Kernel
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns


class Join:
    """One consumer's epilogue; `number` (0 or 1) is the half of the output's columns that it has."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], piece: Piece, number: int) -> None:
        self.kernel, self.geometry, self.schedule = kernel, kernel.geometry, kernel.schedule
        self.refs, self.piece, self.number = refs, piece, number

    def deliver(self, m: Array, total: Array, out: Array) -> None:
        """Writes the share's result, given the maximum, this consumer's sum of weights and its half of the output."""
        g = self.geometry
        total = self.sum_of_both(total)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        lse = jnp.where(total > 0, m + jnp.log2(total), -jnp.inf)
        out = out * over_columns(inverse, g.half)
        if self.schedule.cluster > 1:
            self.send(out, lse)
            self.write_joined()
            return
        if self.number == 0:
            self.write_lse(lse)
        if self.schedule.parts > 1:
            place = (self.piece.index, self.piece.part, self.piece.block)
            half = pl.ds(self.number * g.half, g.half)
            assign(self.refs["out"], (*place, slice(None), half), out)
            return
        chunks = g.half // COLUMN_TILE
        for chunk in range(chunks):
            columns = columns_of(out, chunk * COLUMN_TILE, COLUMN_TILE)
            self.stage(self.number * chunks + chunk, columns)
        plgpu.commit_smem()
        for chunk in range(chunks):
            place = self.number * chunks + chunk
            self.write(place, place * COLUMN_TILE)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sum_of_both(self, total: Array) -> Array:
        """Returns the sum over both consumers, in the same order in both.

        Its barrier also guarantees that the other consumer has finished its products.
        """
        stats = self.refs["stats"]
        assign(stats, 2 + self.number, total)
        plgpu.barrier_arrive(self.refs["done"])
        plgpu.barrier_wait(self.refs["done"])
        load = partial(plgpu.load, layout=PER_ROW, optimized=False)
        return load(stats.at[2]) + load(stats.at[3])

    def stage(self, chunk: int, out: Array) -> None:
        """Stores 64 columns of the output in shared memory for the copy."""
        assign(self.refs["out_tile"].at[chunk], ..., out.astype(self.geometry.dtype))

    def write(self, chunk: int, column: Array | int) -> None:
        """Starts the copy of 64 staged columns to the output; token by token if some rows hold no token."""
        g, piece = self.geometry, self.piece
        staged, heads = self.refs["out_tile"].at[chunk], g.block_heads
        first, columns = piece.first_row(g), pl.ds(column, COLUMN_TILE)
        if not g.packed or heads == WGMMA_ROWS:

            @pl.when(piece.count > 0)
            def _() -> None:
                out = self.refs["out"].at[pl.ds(first, heads), columns]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, heads)], out)

            return

        @pl.loop(0, piece.count)
        def _(token: Array) -> None:
            start = pl.multiple_of(token * heads, ROW_TILE)
            place = pl.ds(pl.multiple_of(first + start, ROW_TILE), heads)
            rows = staged.at[pl.ds(start, heads)]
            plgpu.copy_smem_to_gmem(rows, self.refs["out"].at[place, columns])

    def write_lse(self, lse: Array) -> None:
        """Writes the log-sum-exp in base 2, if it is an output."""
        if "lse" in self.refs:
            assign(self.refs["lse"], (self.piece.index, self.piece.part, self.piece.block), lse)

    def send(self, out: Array, lse: Array) -> None:
        """Sends each block of the cluster the columns that it combines.

        The shares overwrite the tiles, so a cluster barrier first waits until no block reads its tiles.
        """
        refs, cluster = self.refs, self.schedule.cluster
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["all_done"])
        plgpu.barrier_wait(refs["all_done"])
        width = self.geometry.value_dim // cluster
        send = partial(
            plgpu.async_store_smem,
            barrier=refs["shares_arrived"],
            cluster_dim="share",
            optimized=False,
        )
        for place in range(self.geometry.half // width):
            columns = columns_of(out, place * width, width)
            rank = self.number * (cluster // 2) + place
            share = refs["out_shares"].at[self.piece.rank]
            send(columns, share, cluster_idx=jnp.int32(rank))
        if self.number == 0:
            for rank in range(cluster):
                share = refs["lse_shares"].at[self.piece.rank]
                send(over_columns(lse, ROW_TILE), share, cluster_idx=jnp.int32(rank))

    def write_joined(self) -> None:
        """Combines the shares of this block's columns in a fixed order and writes them."""
        refs, cluster = self.refs, range(self.schedule.cluster)
        plgpu.barrier_wait(refs["shares_arrived"])
        load = partial(plgpu.load, layout=WGMMA, optimized=False)
        lses = [jnp.max(load(refs["lse_shares"].at[share]), axis=1) for share in cluster]
        top = reduce(jnp.maximum, lses)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = [jnp.exp2(lse - top) for lse in lses]
        total = reduce(jnp.add, weights)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        if self.number == 0:
            pl.when(self.piece.rank == 0)(lambda: self.write_lse(top + jnp.log2(total)))
        width = self.geometry.value_dim // self.schedule.cluster
        mine = range(self.number, width // COLUMN_TILE, 2)
        for chunk in mine:
            columns = pl.ds(chunk * COLUMN_TILE, COLUMN_TILE)
            parts = [
                load(refs["out_shares"].at[share, :, columns])
                * over_columns(weights[share] * inverse, COLUMN_TILE)
                for share in cluster
            ]
            self.stage(chunk, reduce(jnp.add, parts))
        plgpu.commit_smem()
        for chunk in mine:
            column = self.piece.rank * width + chunk * COLUMN_TILE
            self.write(chunk, pl.multiple_of(column, COLUMN_TILE))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def columns_of(tile: Array, start: int, width: int) -> Array:
    """Returns the columns [start, start + width)."""
    return lax.slice(tile, (0, start), (tile.shape[0], start + width))
