"""A block of the `delta_scan` kernel: its row and its head, and the copies of the row's pieces into shared memory."""

from collections.abc import Callable, Mapping
from functools import partial

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_scan.mosaic_geometry import SIDE, STAGES
from pallas_kernels.delta_scan.mosaic_kernel import Kernel
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA
from pallas_kernels.mosaic.warps import on_warps
from pallas_kernels.packed.row_tasks import Row


class Task:
    """A block's work: the pieces of one row for some units of one head."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        g = self.geometry = kernel.geometry
        self.kernel, self.refs = kernel, dict(refs)
        block = lax.axis_index("block")
        number, place = lax.div(block, jnp.int32(g.blocks)), lax.rem(block, jnp.int32(g.blocks))
        self.row = Row(*(refs["tasks"][number, field] for field in range(len(Row._fields))))
        packs = jnp.int32(g.units // g.consumers)
        self.head, self.first_unit = lax.div(place, packs), lax.rem(place, packs) * g.consumers
        self.pieces = self.row.pieces(SIDE)

    def slot(self, number: Array) -> Array:
        """Returns the pipeline stage of a piece."""
        return lax.rem(number, jnp.int32(STAGES))

    def first_component(self, consumer: Array | int) -> Array:
        """Returns the first component of a consumer's unit among the values of its head."""
        return (self.first_unit + consumer) * SIDE

    def start(self, number: Array) -> None:
        """Starts the copies of a piece into its stage, once that is free, if the row has the piece."""

        def fetch() -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(self.refs["free"].at[slot])
            self.fetch(number, slot)

        @pl.when(number < self.pieces)
        def _() -> None:
            on_warps(fetch, interpret=self.kernel.interpret)

    def fetch(self, number: Array, slot: Array) -> None:
        """Starts the copies of a piece."""
        refs, g = self.refs, self.geometry
        start, length = self.row.piece(number, SIDE)
        arrived = refs["arrived"].at[slot]
        piece = self.row.first_piece + number
        for name in ("inverses", "weights", "factors"):
            source = refs[f"{name}_of"].at[piece, self.head]
            plgpu.copy_gmem_to_smem(source, refs[name].at[slot], arrived)
        served = lax.div(self.head, jnp.int32(g.served)) * g.sizes.key_dim
        for square in range(g.squares):
            target = refs["q_copied"].at[slot, square]
            self.kernel.copy(refs, start, served + square * SIDE, target, arrived)
        for consumer in range(g.consumers):
            column = g.first_value + self.head * g.sizes.value_dim + self.first_component(consumer)
            target = refs["v_copied"].at[slot, consumer]
            self.kernel.copy(refs, start, column, target, arrived)

        def fetch_keys(done: Ref) -> None:
            for square in range(g.squares):
                column, target = g.first_key + square * SIDE, refs["k_copied"].at[slot, square]
                self.kernel.copy(refs, start, served + column, target, done)

        pl.when(length == SIDE)(partial(fetch_keys, arrived))
        pl.when(length < SIDE)(partial(fetch_keys, refs["to_clear"].at[slot]))

    def finish(self, number: Array) -> None:
        """Zeroes keys past the end of a piece, because 0 * NaN is NaN, and then signals the consumers."""
        length = self.row.piece(number, SIDE)[1]

        @pl.when(length < SIDE)
        def _() -> None:
            slot = self.slot(number)
            plgpu.barrier_wait(self.refs["to_clear"].at[slot])
            for square in range(self.geometry.squares):
                keys = self.refs["k"].at[slot, square]
                held = plgpu.load(keys, layout=WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=WGMMA)
                assign(keys, ..., jnp.where(row < length, held, jnp.zeros_like(held)))
            plgpu.commit_smem()
            for _square in range(self.geometry.squares):
                plgpu.barrier_arrive(self.refs["arrived"].at[slot])

    def drain(self) -> None:
        """Waits until all stages are released; the interpreter requires a wait for each completion of a barrier."""
        for slot in range(STAGES):
            plgpu.barrier_wait(self.refs["free"].at[slot])


def in_first(consumer: Array, job: Callable[..., None], *arguments: Array) -> None:
    """Runs a job in the first consumer of a block."""
    pl.when(consumer == 0)(partial(job, *arguments))
