"""A block of the `ssd_scan` kernel: its row, units and pieces."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.packed.row_tasks import Row
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE


class Task:
    """A block's row and units."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], block: Array) -> None:
        g = self.geometry = kernel.geometry
        packs = g.packs(kernel.schedule.consumers)
        number, pack = lax.div(block, jnp.int32(packs)), lax.rem(block, jnp.int32(packs))
        self.row = Row(*(refs["tasks"][number, field] for field in range(len(Row._fields))))
        self.first_unit = pack * kernel.schedule.consumers
        self.group = lax.div(self.first_unit, jnp.int32(g.units_per_group))
        self.first_piece = self.row.first_piece
        self.pieces = self.row.pieces(SIDE)

    def unit(self, consumer: Array | int) -> tuple[Array, Array]:
        """Returns the head of a consumer's unit, and the unit's first column in x."""
        unit = self.first_unit + consumer
        return lax.div(unit, jnp.int32(self.geometry.units_per_head)), unit * SIDE

    def piece(self, number: Array) -> tuple[Array, Array]:
        """Returns a piece's first token and its number of tokens."""
        return self.row.piece(number, SIDE)


class Worker:
    """Base class of the kernel's warpgroups; `number` is the warpgroup's index in its block."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        self.kernel, self.geometry, self.refs = kernel, kernel.geometry, refs
        self.number = number
        self.task = Task(kernel, refs, lax.axis_index("block"))

    def slot(self, number: Array) -> Array:
        """Returns the pipeline stage of a piece."""
        return lax.rem(number, jnp.int32(self.kernel.schedule.stages))
