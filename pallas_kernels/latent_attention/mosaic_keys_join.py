"""Epilogue of the kernel in mosaic_keys.py: normalisation, combination of a cluster's shares, and output."""

from collections.abc import Mapping
from functools import partial, reduce

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, over_rows


class KeysJoin:
    """A block's epilogue; outputs are components x heads until they are staged for the copy."""

    def __init__(self, kernel: KeysKernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.schedule = kernel, kernel.geometry, kernel.schedule
        self.refs, self.piece = refs, piece

    def deliver(self, m: Array, total: Array, outs: tuple[Array, ...]) -> None:
        """Writes the share's result, given its maximum, its sums of weights and its unnormalised output."""
        total = jnp.sum(total, axis=0)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        lse = jnp.where(total > 0, m + jnp.log2(total), -jnp.inf)
        outs = tuple(out * over_rows(inverse, out.shape[0]) for out in outs)
        if self.schedule.cluster > 1:
            self.send(outs, lse)
            self.write_joined()
            return
        self.write_lse(lse)
        if self.schedule.parts > 1:
            row = 0
            for out in outs:
                place = (self.piece.index, self.piece.part, self.piece.block)
                assign(self.refs["out"], (*place, pl.ds(row, out.shape[0])), out)
                row += out.shape[0]
            return
        chunks = chunks_of(outs)
        for chunk, out in enumerate(chunks):
            self.stage(chunk, out)
        plgpu.commit_smem()
        for chunk in range(len(chunks)):
            self.write(chunk, chunk * COLUMN_TILE)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def stage(self, chunk: int, out: Array) -> None:
        """Stores 64 components of the output in shared memory for the copy."""
        staged = self.refs["out_tile"].at[chunk].transpose((1, 0))
        assign(staged, ..., out.astype(self.geometry.dtype))

    def write(self, chunk: int, column: Array | int) -> None:
        """Starts the copy of 64 staged components to the output."""
        rows = pl.ds(self.piece.first_row(self.geometry), self.geometry.heads)
        out = self.refs["out"].at[rows, pl.ds(column, COLUMN_TILE)]
        plgpu.copy_smem_to_gmem(self.refs["out_tile"].at[chunk], out)

    def write_lse(self, lse: Array) -> None:
        """Writes the log-sum-exp in base 2, if it is an output."""
        if "lse" in self.refs:
            assign(self.refs["lse"], (self.piece.index, self.piece.part, self.piece.block), lse)

    def send(self, outs: tuple[Array, ...], lse: Array) -> None:
        """Sends each block of the cluster the components that it combines.

        The shares overwrite the tiles, so a cluster barrier first waits until no block reads its tiles.
        """
        refs, cluster = self.refs, self.schedule.cluster
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["all_done"])
        plgpu.barrier_wait(refs["all_done"])
        send = partial(
            plgpu.async_store_smem,
            barrier=refs["shares_arrived"],
            cluster_dim="share",
            optimized=False,
        )
        chunks = chunks_of(outs)
        each = len(chunks) // cluster
        for chunk, out in enumerate(chunks):
            rows = pl.ds(chunk % each * COLUMN_TILE, COLUMN_TILE)
            share = refs["out_shares"].at[self.piece.rank, rows]
            send(out, share, cluster_idx=jnp.int32(chunk // each))
        for rank in range(cluster):
            share = refs["lse_shares"].at[self.piece.rank]
            send(over_rows(lse, TILE), share, cluster_idx=jnp.int32(rank))

    def write_joined(self) -> None:
        """Combines the shares of this block's components in a fixed order and writes them."""
        refs, cluster = self.refs, range(self.schedule.cluster)
        plgpu.barrier_wait(refs["shares_arrived"])
        load = partial(plgpu.load, layout=WGMMA, optimized=False)
        lses = [load(refs["lse_shares"].at[share]) for share in cluster]
        top = reduce(jnp.maximum, lses)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = [jnp.exp2(lse - top) for lse in lses]
        total = reduce(jnp.add, weights)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        lse = jnp.max(top + jnp.log2(total), axis=0)
        pl.when(self.piece.rank == 0)(lambda: self.write_lse(lse))
        width = self.geometry.value_dim // self.schedule.cluster
        for chunk in range(width // COLUMN_TILE):
            rows = pl.ds(chunk * COLUMN_TILE, COLUMN_TILE)
            parts = [
                load(refs["out_shares"].at[share, rows]) * (weights[share] * inverse)
                for share in cluster
            ]
            self.stage(chunk, reduce(jnp.add, parts))
        plgpu.commit_smem()
        for chunk in range(width // COLUMN_TILE):
            column = self.piece.rank * width + chunk * COLUMN_TILE
            self.write(chunk, pl.multiple_of(column, COLUMN_TILE))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def chunks_of(outs: tuple[Array, ...]) -> list[Array]:
    """Cuts the pieces of the output into chunks of 64 components."""
    return [
        lax.slice(out, (row, 0), (row + COLUMN_TILE, out.shape[1]))
        for out in outs
        for row in range(0, out.shape[0], COLUMN_TILE)
    ]
