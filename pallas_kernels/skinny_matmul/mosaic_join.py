"""How the two blocks of a cluster, each with half of the contraction, add up a tile's sums through shared memory.

Each block ends the tile for half of the rows of x: the other one sends it its sums of these rows, eight rows at a
time, right from registers. It adds them in the order of the halves, so that a row's bits do not depend on who comes
first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, swizzled
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule


def shared(geometry: Geometry, schedule: Schedule) -> dict[str, Any]:
    """Returns the scratch that a block of a cluster receives sums in."""
    groups = schedule.window(geometry) // ROW_TILE
    shape = (schedule.cluster, groups, schedule.height(geometry), ROW_TILE)
    return {
        "shares": plgpu.SMEM(shape, jnp.float32, transforms=swizzled(ROW_TILE, jnp.float32)),
        "shares_arrived": plgpu.Barrier(num_arrivals=schedule.cluster * groups),
    }


def rows_of(sums: Array, first: int, count: int) -> Array:
    """Returns the sums of so many rows of x, or of those that there are."""
    stop = min(first + count, sums.shape[1])
    return lax.slice(sums, (0, first), (sums.shape[0], stop))


class Join:
    """The end of one block's share of a tile."""

    def __init__(
        self, geometry: Geometry, schedule: Schedule, refs: Mapping[str, Ref], rank: Array
    ) -> None:
        self.geometry, self.schedule, self.refs, self.rank = geometry, schedule, refs, rank
        self.window = schedule.window(geometry)

    def deliver(self, sums: Array, store: Callable[[Array | int, int], None]) -> None:
        """Sends all sums to the blocks that end their rows, adds up what came for this one, and stores its rows."""
        self.send(sums)
        self.add_up()
        rest = self.geometry.rows - self.window
        if rest == self.window:
            store(self.rank * self.window, self.window)
            return
        pl.when(self.rank == 0)(lambda: store(0, self.window))
        pl.when(self.rank == 1)(lambda: store(self.window, rest))

    def send(self, sums: Array) -> None:
        """Sends eight rows' sums at a time; where there are no such rows, others' in their place, to be counted."""
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
        """Puts the sums over all shares where the ending takes them from."""
        shares = self.refs["shares"]
        plgpu.barrier_wait(self.refs["shares_arrived"])
        for group in range(self.window // ROW_TILE):
            found = [
                plgpu.load(shares.at[share, group], layout=WGMMA, optimized=False)
                for share in range(self.schedule.cluster)
            ]
            rows = pl.ds(group * ROW_TILE, ROW_TILE)
            self.refs["sums"].at[:, rows][...] = sum(found[1:], found[0])
        plgpu.commit_smem()
