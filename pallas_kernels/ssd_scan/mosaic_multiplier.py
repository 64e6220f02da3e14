"""Products of 64 x 64 squares, and loads and stores of states, for the consumers of the `ssd_scan` kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import load
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_task import Task, Worker

SQUARE = (SIDE, SIDE)
# Slices of the two rows of a piece's decays.
PASSED, LESS = pl.ds(0, SIDE), pl.ds(SIDE, SIDE)


class Multiplier(Worker):
    """Base class of a consumer warpgroup, for 64 components of one head."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        super().__init__(kernel, refs)
        self.number = number
        self.task = Task(kernel, refs, lax.axis_index("block"))
        self.head, self.column = self.task.unit(number)

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

    def skip(self) -> Array:
        """Returns the head's factor of the skip connection."""
        return self.refs["d"][self.head].astype(jnp.float32)

    def places(self, state: Array) -> list[Ref]:
        """Returns refs to the squares of a state in the pool."""
        rows = pl.ds(self.column - self.head * self.geometry.sizes.head_dim, SIDE)
        pool = self.refs["states"]
        return [
            pool.at[state, self.head, rows, pl.ds(block * SIDE, SIDE)]
            for block in range(self.geometry.blocks)
        ]

    def exists(self, state: Array) -> Array:
        """Returns whether the id is a state of the pool."""
        return (state >= 0) & (state < self.refs["states"].shape[0])

    def begun(self) -> list[Array]:
        """Returns the row's initial state in float32, zeros for an id past the end."""
        read = self.task.row.read
        known = self.exists(read)
        squares = self.places(jnp.where(known, read, 0))
        loaded = [load(square, WGMMA) for square in squares]
        return [jnp.where(known, part.astype(jnp.float32), 0.0) for part in loaded]

    def keep(self, number: Array, state: Sequence[Array]) -> None:
        """Writes the state after piece `number` as a snapshot, if there is one."""
        if "kept" in self.refs:
            self.write_state(self.refs["kept"][self.task.first_piece + number], state)

    def write_state(self, place: Array, state: Sequence[Array]) -> None:
        """Writes a state to the pool, unless the id is past the end."""

        @pl.when(self.exists(place))
        def _() -> None:
            for ref, part in zip(self.places(place), state, strict=True):
                assign(ref, ..., part.astype(self.geometry.state_dtype))
