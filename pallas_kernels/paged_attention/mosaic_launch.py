"""Launch of the Mosaic GPU kernel of `paged_attention`: grid, cluster, outputs, shared memory and mbarriers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled
from pallas_kernels.paged_attention.mosaic_packed import PackedTiles
from pallas_kernels.paged_attention.mosaic_row import RowBlock
from pallas_kernels.paged_attention.mosaic_schedule import TILE, Geometry, Schedule
from pallas_kernels.paged_attention.mosaic_wide import WideTiles


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one set of options and one schedule.

    Attributes:
        geometry: sizes of heads and pages.
        options: scale, window and soft cap.
        schedule: clusters, parts and stages.
        has_lse: whether the log-sum-exp is an output.
        has_sinks: whether sinks are an input.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
        goes_on: whether rows go on from shared keys: `SharedKeys.places` and `lens`, the number of parts and the
            results of `SharedKernel` are inputs.
    """

    geometry: Geometry
    options: ScoreOptions
    schedule: Schedule
    has_lse: bool
    has_sinks: bool
    interpret: bool = False
    goes_on: bool = False

    def build(self, rows: int) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel for `rows` rows."""
        cluster = self.schedule.cluster
        clusters = {"cluster": (cluster,), "cluster_names": ("share",)} if cluster > 1 else {}
        return mosaic_kernel(
            self._body,
            out_type=self._out_type(rows),
            scratch_types=self._scratch(),
            grid=(rows, self.geometry.kv_heads, self.schedule.parts),
            grid_names=("row", "kv_head", "part"),
            # The kernel places its barriers between warps itself.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=self.interpret,
            kernel_name="paged_attention",
            **clusters,
        )

    def _out_type(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        g, parts = self.geometry, self.schedule.parts
        out_type = [jax.ShapeDtypeStruct((rows, g.heads, g.head_dim), g.dtype)]
        if parts > 1:
            shape = (rows, parts, g.kv_heads, g.head_dim, g.columns)
            out_type = [jax.ShapeDtypeStruct(shape, jnp.float32)]
        if self.has_lse:
            shape = (rows, parts, g.kv_heads, g.columns)
            out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g, stages = self.geometry, self.schedule.stages
        packed = swizzled(g.head_dim, g.pages_dtype)
        tiles = plgpu.SMEM((stages, TILE, g.head_dim), g.pages_dtype, transforms=packed)
        arrived = plgpu.Barrier(num_arrivals=g.copies_per_tile, num_barriers=stages)
        wide, tall = swizzled(g.head_dim, g.dtype), swizzled(TILE, g.operand)
        scratch = {
            "k_tiles": tiles,
            "v_tiles": tiles,
            "p_tile": plgpu.SMEM((g.columns, TILE), g.operand, transforms=tall),
            "q_arrived": plgpu.Barrier(),
            "k_arrived": arrived,
            "v_arrived": arrived,
        }
        queries = (g.columns, g.head_dim)
        plain = plgpu.SMEM(queries, g.dtype)
        if g.stored is None:
            scratch["q_tile"] = plgpu.SMEM(queries, g.dtype, transforms=wide)
            scratch["out_tile"] = plain
        else:
            scratch["q_tile"] = plain
            scratch["q_operand"] = plgpu.SMEM(queries, g.operand, transforms=wide)
            scratch["v_operand"] = plgpu.SMEM((TILE, g.head_dim), g.operand, transforms=wide)
        return scratch | self._scratch_of_cluster()

    def _scratch_of_cluster(self) -> dict[str, Any]:
        g, cluster = self.geometry, self.schedule.cluster
        if cluster == 1:
            return {}
        scratch: dict[str, Any] = {"shares_arrived": plgpu.Barrier(num_arrivals=2 * cluster)}
        for name, height in (("out_shares", g.head_dim), ("lse_shares", TILE)):
            shape = (cluster, height, g.columns)
            transforms = swizzled(g.columns, jnp.float32, 32)
            scratch[name] = plgpu.SMEM(shape, jnp.float32, transforms=transforms)
        return scratch

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        g = self.geometry
        names = ["q", "k_pages", "v_pages", "page_table", "seq_lens"]
        names += ["sinks"] * self.has_sinks
        names += ["k_scales", "v_scales"] * (g.stored is not None)
        if self.goes_on:
            names += ["places", "shared_lens", "shared_parts"]
            names += ["shared_m", "shared_total", "shared_acc"]
        names += ["out", "lse"]
        refs_by_name = dict(zip(names, refs, strict=False)) | scratch
        block = RowBlock(g, self.options, self.schedule, refs_by_name, interpret=self.interpret)
        block.begin()
        packed = g.stored is not None
        tiles = PackedTiles(block, interpret=self.interpret) if packed else WideTiles(block)
        block.end(*tiles.attend())
