"""The Mosaic GPU kernel of `ragged_attention` for Hopper: what it is built from, and who does what in a block.

A block has three warpgroups: two consumers (mosaic_consumer.py), each with 64 rows of queries, and a producer
(mosaic_producer.py) that keeps tiles of keys and values in flight for both. A piece of work (mosaic_piece.py) is one
tile of tokens and one pack of heads; the rows of a consumer are its tokens for the pack's first head, then for the
second, and so on. All three go through the same pieces, and through the same tiles of keys in each.

Refs to whole arrays are named like the arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention_scores import Options
from pallas_kernels.ragged_attention.mosaic_consumer import Consumer
from pallas_kernels.ragged_attention.mosaic_piece import Ref
from pallas_kernels.ragged_attention.mosaic_producer import Producer
from pallas_kernels.ragged_attention.mosaic_schedule import (
    CONSUMERS,
    HEIGHT,
    ROW_TILE,
    Geometry,
    Schedule,
)

# What makes transforms whole classes is private to JAX.
_transform: Any = plgpu
SWIZZLED = (_transform.TilingTransform((ROW_TILE, 64)), _transform.SwizzleTransform(128))
# Registers per thread, which start as 168 for each warpgroup: a sum above 504 would wait for ever.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one set of options and one schedule."""

    geometry: Geometry
    options: Options
    schedule: Schedule
    num_tiles: int
    has_lse: bool
    has_sinks: bool
    interpret: bool

    def build(self, tokens: int) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel."""
        mode = plgpu.InterpretGPUParams(
            detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
        )
        g = self.geometry
        out_type = [jax.ShapeDtypeStruct((tokens, g.heads, g.head_dim), g.dtype)]
        if self.has_lse:
            shape = (self.num_tiles, g.units, CONSUMERS, HEIGHT)
            out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return plgpu.kernel(
            self._body,
            out_type=out_type,
            scratch_types=self._scratch(),
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            # Each place that needs a barrier between warps says so.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=mode if self.interpret else None,
            kernel_name="ragged_attention",
        )

    @property
    def pieces(self) -> int:
        """Pieces of work, at most."""
        return self.num_tiles * self.geometry.units

    @property
    def blocks(self) -> int:
        """Blocks of the launch; sinks leave no registers for several pieces in one."""
        return self.pieces if self.has_sinks else min(self.pieces, self.schedule.blocks)

    def _scratch(self) -> dict[str, Any]:
        g, s = self.geometry, self.schedule
        tiles = plgpu.SMEM((s.stages, s.keys, g.head_dim), g.dtype, transforms=SWIZZLED)
        rows = (s.query_slots, CONSUMERS, HEIGHT, g.head_dim)
        copies = s.keys // g.copy_height(s.keys)
        free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.stages)
        scratch = {
            "q_tiles": plgpu.SMEM(rows, g.dtype, transforms=SWIZZLED),
            "out_rows": plgpu.SMEM(rows, g.dtype),
            "k_tiles": tiles,
            "v_tiles": tiles,
            "q_arrived": plgpu.Barrier(num_arrivals=CONSUMERS * g.pack, num_barriers=s.query_slots),
            "q_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.query_slots),
            "k_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
            # The last one is the producer's own, for values that it has yet to clear.
            "v_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages + 1),
            "k_free": free,
            "v_free": free,
            "turn": plgpu.Barrier(num_barriers=CONSUMERS),
        }
        if not self.interpret:
            # The output leaves from where the queries were, swizzled or, where it goes row by row, as it stands.
            # The interpreter takes any two places of a union for the same.
            both = [scratch.pop(name) for name in ("q_tiles", "out_rows")]
            scratch["queries"] = plgpu.RefUnion(*both)
        else:
            # The interpreter multiplies nothing that is in registers.
            scratch["scores"] = plgpu.SMEM((CONSUMERS, HEIGHT, s.keys), jnp.float32)
            scratch["acc"] = plgpu.SMEM((CONSUMERS, HEIGHT, g.head_dim), jnp.float32)
        return scratch

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        names = ["q", "k_pages", "v_pages", "page_table", "tiles", "num_tiles"]
        names += ["k_scales", "v_scales"] * self.geometry.scaled
        names += ["sinks"] * self.has_sinks + ["out"] + ["lse"] * self.has_lse
        found = dict(zip(names, refs, strict=True)) | scratch
        if not self.interpret:
            found["q_tiles"], found["out_rows"] = scratch["queries"]
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            Consumer(self, found, warpgroup).run()

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            Producer(self, found).run()
