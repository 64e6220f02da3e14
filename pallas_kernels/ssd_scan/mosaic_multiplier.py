"""Products of 64 x 64 squares, for the warpgroups of the `ssd_scan` kernel."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_COLUMN, WGMMA
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_task import Worker

SQUARE = (SIDE, SIDE)
# Slices of the two rows of a piece's decays, and of its factors.
PASSED, LESS = pl.ds(0, SIDE), pl.ds(SIDE, SIDE)


class Multiplier(Worker):
    """Base class of a warpgroup, with products of squares."""

    def with_squares(self, run: Callable[..., None], count: int) -> None:
        """Calls a function with `count` accumulators."""
        if not self.kernel.interpret:
            pl.run_scoped(run, *[plgpu.ACC(SQUARE, jnp.float32)] * count)
            return
        run(*(self.refs["sums"].at[self.number, index] for index in range(count)))

    def multiply(
        self,
        total: Ref,
        left: Any,  # noqa: ANN401 - a ref or an array
        right: Ref,
        *,
        right_transposed: bool = False,
    ) -> None:
        """Issues the wgmma that adds a product to an accumulator."""
        if not self.kernel.interpret:
            plgpu.wgmma(total, left, right.transpose((1, 0)) if right_transposed else right)
            return
        left, right = left[...].astype(jnp.float32), right[...].astype(jnp.float32)
        total[...] += lax.dot(left, right.T if right_transposed else right)

    def result(self, total: Ref, in_flight: int | None) -> Array:
        """Returns an accumulator's value after waiting until at most `in_flight` later products are pending."""
        if self.kernel.interpret:
            return total[...]
        return plgpu.wgmma_accumulator_load(total, wait_n=in_flight)

    def zeros(self) -> Array:
        """Returns a square of zeros."""
        return plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)

    def per_column(self, values: Ref) -> Array:
        """Loads one value per column, and repeats them over all rows of a square."""
        return broadcast(load(values, PER_COLUMN), SQUARE, 1, WGMMA)
