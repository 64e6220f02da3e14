"""Launch of the `skinny_matmul` kernel on Hopper: grid, clusters, outputs, shared memory and mbarriers.

The weight is the left operand of wgmma and fills its 64 rows for any number of rows of x. The rows of x are the
right operand, whose width is any multiple of 8. A weight in few bits has its own products (mosaic_few_bits.py). One
warpgroup does everything: between two iterations it only starts the TMA copies of a later chunk, so the memory is never
idle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE
from pallas_kernels.formats.few_bits import CODES
from pallas_kernels.mosaic.launch import LANE_PARAMS, await_previous, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled
from pallas_kernels.skinny_matmul.mosaic_block import Block
from pallas_kernels.skinny_matmul.mosaic_ending import Ending
from pallas_kernels.skinny_matmul.mosaic_few_bits import multiply_few_bits
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_join import shared
from pallas_kernels.skinny_matmul.mosaic_schedule import PADDING, Schedule
from pallas_kernels.skinny_matmul.mosaic_wide import multiply_wide


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one schedule and one epilogue.

    Attributes:
        geometry: sizes; `geometry.rows` rows of x are in each group.
        schedule: how the weight is divided.
        ending: the epilogue.
        groups: groups of rows, which are multiplied in the same way; blocks of one tile of the weight are adjacent.
        early: whether the weight is copied while the previous kernel still runs (`argument_weights`).
    """

    geometry: Geometry
    schedule: Schedule
    ending: Ending
    groups: int = 1
    early: bool = False

    def build(self, interpret: bool) -> Callable[..., list[Array]]:
        """Returns the function of the weight's arrays, x and the epilogue's inputs that launches the kernel.

        It returns the outputs of the epilogue (`Ending.outputs`); sums of squares have shape [tiles, rows].
        """
        several = (self.groups,) if self.groups > 1 else ()
        clusters: dict[str, Any] = {}
        if self.schedule.cluster > 1:
            clusters = {"cluster": (self.schedule.cluster,), "cluster_names": ("share",)}
        return mosaic_kernel(
            partial(self._body, interpret),
            out_type=self._out_type(),
            scratch_types=self._scratch(),
            grid=(self.schedule.grid(self.geometry), self.schedule.splits, *several),
            grid_names=("block", "split", *("group" for _ in several)),
            **clusters,
            # `Block` places every barrier between warps itself.
            compiler_params=LANE_PARAMS,
            interpret=interpret,
            early=self.early,
            kernel_name="skinny_matmul",
        )

    def _out_type(self) -> list[jax.ShapeDtypeStruct]:
        g, s = self.geometry, self.schedule
        rows = self.groups * g.rows
        if s.splits > 1:
            return [jax.ShapeDtypeStruct((s.splits, rows, g.parts * g.out), jnp.float32)]
        out_type = [jax.ShapeDtypeStruct((rows, g.out), self.ending.result)]
        if self.ending.weighs:
            squares = jax.ShapeDtypeStruct((s.tiles(g), rows), jnp.float32)
            out_type = [*out_type, *out_type, squares]
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule

        def slots(shape: tuple[int, ...], dtype: DTypeLike) -> Any:  # noqa: ANN401 - private to JAX
            return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))

        stored, octets = g.dtype, s.chunk(g)
        if g.packing is not None:
            stored, octets = CODES[g.packing.code].stored, s.chunk(g) * g.bits // 8

        copies = s.folds * (g.parts + 1)
        factors = (
            {}
            if self.ending.norm_eps is None
            else {"factors": plgpu.SMEM((g.padded_rows,), jnp.float32)}
        )
        return {
            **factors,
            **(shared(g, s) if s.cluster > 1 else {}),
            "weights": slots(((s.stages - 1) * s.height(g) + s.product_rows(g), octets), stored),
            "inputs": slots((s.stages, s.width(g), s.chunk(g)), g.dtype),
            "sums": plgpu.SMEM((s.product_rows(g), s.sums_width(g) + PADDING), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        }

    def _body(self, interpret: bool, *refs: Ref, **scratch: Ref) -> None:
        packing = self.geometry.packing
        parts = [] if packing is None else packing.names
        names = ["weight", *parts, "x", *self.ending.inputs, *self.ending.outputs]
        named = dict(zip(names, refs, strict=True))
        first = None
        if self.groups > 1:
            # Each group has `MOST_ROWS` rows.
            first = pl.multiple_of(lax.axis_index("group") * self.geometry.rows, ROW_TILE)
        begin = partial(await_previous, interpret=interpret) if self.early else None
        block = Block(self.geometry, self.schedule, self.ending, named | scratch, first, begin)
        if packing is None:
            block.run(multiply_wide)
            return
        block.run(partial(multiply_few_bits, interpret=interpret))
