"""Split-K reduction between the two blocks of a cluster through distributed shared memory.

Each block has half of the contraction, and finishes the tile for half of the rows of x. The other block sends it its
sums of these rows from registers, eight rows at a time. They are added in the order of the halves, so a row's bits do
not depend on the order of arrival.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, swizzled
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule


def shared(geometry: Geometry, schedule: Schedule) -> dict[str, Any]:
    """Returns the shared memory and barrier with which a block of a cluster receives sums."""
    groups = schedule.window(geometry) // ROW_TILE
    shape = (schedule.cluster, groups, schedule.height(geometry), ROW_TILE)
    return {
        "shares": plgpu.SMEM(shape, jnp.float32, transforms=swizzled(ROW_TILE, jnp.float32)),
        "shares_arrived": plgpu.Barrier(num_arrivals=schedule.cluster * groups),
    }


def rows_of(sums: Array, first: int, count: int) -> Array:
    """Returns the sums of at most `count` rows of x from `first` on."""
    stop = min(first + count, sums.shape[1])
    return lax.slice(sums, (0, first), (sums.shape[0], stop))


class Join:
    """The reduction of a tile's sums in one block of the cluster."""

    def __init__(
        self, geometry: Geometry, schedule: Schedule, refs: Mapping[str, Ref], rank: Array
    ) -> None:
        self.geometry, self.schedule, self.refs, self.rank = geometry, schedule, refs, rank
        self.window = schedule.window(geometry)

    def deliver(self, sums: Array, store: Callable[[Array | int, int], None]) -> None:
        """Sends all sums to the blocks that finish their rows, adds up those of this block's rows and stores them."""
        self.send(sums)
        self.add_up()
        rest = self.geometry.rows - self.window
        if rest == self.window:
            store(self.rank * self.window, self.window)
            return
        pl.when(self.rank == 0)(lambda: store(0, self.window))
        pl.when(self.rank == 1)(lambda: store(self.window, rest))

    def send(self, sums: Array) -> None:
        """Sends sums, eight rows at a time; missing rows are replaced by the last ones, since arrivals are counted."""
        last = self.geometry.padded_rows - ROW_TILE
        for rank in range(self.schedule.cluster):
            for group in range(self.window // ROW_TILE):
                first = min(rank * self.window + group * ROW_TILE, last)
                plgpu.async_store_smem(
                    rows_of(sums, first, ROW_TILE),
                    self.refs["shares"].at[self.rank, group],
                    self.refs["shares_arrived"],
                    cluster_idx=jnp.int32(rank),
                    cluster_dim="share",
                    optimized=False,
                )

    def add_up(self) -> None:
        """Writes the sums over all shares to shared memory for the epilogue."""
        shares = self.refs["shares"]
        plgpu.barrier_wait(self.refs["shares_arrived"])
        for group in range(self.window // ROW_TILE):
            found = [
                plgpu.load(shares.at[share, group], layout=WGMMA, optimized=False)
                for share in range(self.schedule.cluster)
            ]
            rows = pl.ds(group * ROW_TILE, ROW_TILE)
            assign(self.refs["sums"].at[:, rows], ..., sum(found[1:], found[0]))
        plgpu.commit_smem()
