"""What a `skinny_matmul` kernel asks into L2 for the product that comes after it.

Between two products the memory would rest: blocks of the first end one by one, a launch takes its time, and the first
copies of the second have to arrive. So who has sent for all of its own weight sends for what the next product's
blocks will fetch first. No result depends on it.
"""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.skinny_matmul.mosaic_schedule import ROW_TILE, Geometry, Schedule

Ref = Any

AHEAD_BYTES = 8 * 2**20
"""What a kernel asks for; the memory reads that much while a launch and the first copies are on their way."""


@dataclass(frozen=True)
class Ahead:
    """The first turns of the next product.

    Attributes:
        geometry: of the next product.
        schedule: that it runs under.
        turns: of each of its blocks that are asked for.
    """

    geometry: Geometry
    schedule: Schedule
    turns: int

    @classmethod
    def of(cls, weight: Array, rows: int, dtype: DTypeLike, *, gated: bool) -> "Ahead | None":
        """Returns what to ask for, or `None` if no kernel will take that weight and so many rows of a dtype."""
        parts = 2 if gated else 1
        out, inner = weight.shape[0] // parts, weight.shape[1]
        geometry = Geometry(rows, out, inner, gated, jnp.dtype(dtype), weight.dtype)
        if geometry.refusal() is not None:
            return None
        schedule = Schedule.of(geometry)
        turn_bytes = schedule.height(geometry) * schedule.chunk(geometry) * weight.dtype.itemsize
        turn_bytes *= schedule.grid(geometry) * schedule.splits
        steps = schedule.turns_per_tile(geometry) * schedule.tiles_per_block(geometry)
        turns = min(AHEAD_BYTES // turn_bytes, schedule.stages, steps)
        return cls(geometry, schedule, turns) if turns else None

    def ask(self, weight: Ref, block: Array, blocks: int) -> None:
        """Asks for one block's share of the weight.

        Args:
            weight: in global memory.
            block: number of the block that asks.
            blocks: how many ask.
        """
        theirs = self.schedule.grid(self.geometry) * self.schedule.splits
        for first in range(0, theirs, blocks):
            index = block + first
            self._ask_for(weight, index, None if first + blocks <= theirs else index < theirs)

    def _ask_for(self, weight: Ref, index: Array, is_one: Array | None) -> None:
        """Asks for what one block of the next product fetches first, if there is such a block."""
        g, s = self.geometry, self.schedule
        block, split = lax.div(index, jnp.int32(s.splits)), lax.rem(index, jnp.int32(s.splits))
        for step in range(self.turns):
            tile, turn = divmod(step, s.turns_per_tile(g))
            start = (block * s.tiles_per_block(g) + tile) * s.columns
            column = jnp.minimum(start, g.out - s.columns)
            chunk = (split * s.turns_per_tile(g) + turn) * s.folds
            inner = pl.ds(pl.multiple_of(chunk * s.chunk(g), g.piece), s.chunk(g) * s.folds)
            for part in range(g.parts):
                rows = pl.multiple_of(column + part * g.out, ROW_TILE)
                plgpu.async_prefetch(weight.at[pl.ds(rows, s.columns), inner], predicate=is_one)
