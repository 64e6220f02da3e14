"""The Mosaic GPU kernel of `latent_attention` for one query of few heads per row: keys stand on the left of products.

wgmma wants 64 rows on its left, which 16 heads would leave three quarters empty; keys and components of values fill
them. A block has two warpgroups: one multiplies (mosaic_keys_consumer.py) and one keeps copies in flight
(mosaic_keys_producer.py). A tile of 64 keys lies in pieces of columns, and as many pieces as fit form a ring, so that
what was multiplied makes room at once.

Refs to whole arrays are named like the arrays; `tiles` are the pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.latent_attention.mosaic_kernel import swizzled
from pallas_kernels.latent_attention.mosaic_keys_consumer import KeysConsumer
from pallas_kernels.latent_attention.mosaic_keys_producer import KeysProducer
from pallas_kernels.latent_attention.mosaic_pieces import Piece, Ref
from pallas_kernels.latent_attention.mosaic_schedule import (
    COLUMN_TILE,
    TILE,
    Geometry,
    Schedule,
)
from pallas_kernels.mosaic_rows import INTERPRETED

# Of the shared memory of a block: what is left to pieces, queries and weights.
_MOST_BYTES = 232448 - 4096
# Barriers that a warpgroup can remember the phases of are 32.
_MOST_PLACES = 24
# A maximum over rows crosses warps.
_REDUCTION_BYTES = 2048
_ARRAYS = ("latent_pages", "page_table", "seq_lens")


def narrowly_swizzled(dtype: DTypeLike) -> tuple[Any, ...]:
    """Returns the transforms of shares, whose rows may be no wider than 8 heads."""
    return swizzled(dtype, 32 // jnp.dtype(dtype).itemsize)


@dataclass(frozen=True)
class KeysKernel:
    """The kernel for one geometry, one scale and one schedule."""

    geometry: Geometry
    scale: float
    schedule: Schedule
    pieces: int
    has_lse: bool
    interpret: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each piece of a tile."""
        columns = 3 * COLUMN_TILE if self.geometry.width % (3 * COLUMN_TILE) == 0 else COLUMN_TILE
        return (columns,) * (self.geometry.width // columns)

    @property
    def ring(self) -> int:
        """Pieces that a block holds."""
        g = self.geometry
        piece, others = TILE * self.widths[0] * 2, g.heads * (g.width + TILE) * 2
        return min((_MOST_BYTES - others) // piece, _MOST_PLACES)

    def build(self, tokens: int) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel."""
        s = self.schedule
        clusters: dict[str, Any] = {}
        if s.cluster > 1:
            clusters = {"cluster": (s.cluster,), "cluster_names": ("share",)}
        return plgpu.kernel(
            self._body,
            out_type=self._out_type(tokens),
            scratch_types=self._scratch(),
            grid=(self.pieces, s.parts, 1),
            grid_names=("piece", "part", "block"),
            num_threads=2,
            thread_name="warpgroup",
            # Each place that needs a barrier between warps says so.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=_REDUCTION_BYTES,
            ),
            interpret=INTERPRETED if self.interpret else None,
            kernel_name="latent_attention",
            **clusters,
        )

    def _out_type(self, tokens: int) -> list[jax.ShapeDtypeStruct]:
        g, parts = self.geometry, self.schedule.parts
        places = (self.pieces, parts, 1)
        out_type = [jax.ShapeDtypeStruct((tokens * g.heads, g.value_dim), g.dtype)]
        if parts > 1:
            out_type = [jax.ShapeDtypeStruct((*places, g.value_dim, g.heads), jnp.float32)]
        if self.has_lse:
            out_type.append(jax.ShapeDtypeStruct((*places, g.heads), jnp.float32))
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g = self.geometry
        wide = swizzled(g.dtype)
        tiles = plgpu.SMEM((self.ring, TILE, self.widths[0]), g.dtype, transforms=wide)
        queries = plgpu.SMEM((1, g.heads, g.width), g.dtype, transforms=wide)
        columns = (g.value_dim // COLUMN_TILE, g.heads, COLUMN_TILE)
        out = plgpu.SMEM(columns, g.dtype, transforms=wide)
        p_tile = plgpu.SMEM((1, g.heads, TILE), g.dtype, transforms=wide)
        scratch = {"p_tile": p_tile, **self._barriers()}
        if self.interpret:
            # The interpreter takes two places of a union for the same, and multiplies nothing that is in registers.
            return scratch | {
                "tiles": tiles,
                "q_tile": queries,
                "out_tile": out,
                "scores": plgpu.SMEM((TILE, g.heads), jnp.float32),
                "acc": plgpu.SMEM((g.value_dim, g.heads), jnp.float32),
            }
        scratch["queries"] = plgpu.RefUnion(queries, out)
        cluster = self.schedule.cluster
        if cluster == 1:
            return scratch | {"tiles": tiles}
        shares = [
            plgpu.SMEM(
                (cluster, height, g.heads), jnp.float32, transforms=narrowly_swizzled(jnp.float32)
            )
            for height in (g.value_dim // cluster, TILE)
        ]
        return scratch | {"tiles_or_shares": plgpu.RefUnion(tiles, tuple(shares))}

    def _barriers(self) -> dict[str, Any]:
        cluster, copies = self.schedule.cluster, self.geometry.copies_per_tile
        # The last ones are the producer's own, for values that it has yet to clear.
        arrived = self.ring + len(self.widths)
        barriers: dict[str, Any] = {
            "q_arrived": plgpu.Barrier(),
            "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=arrived),
            "free": plgpu.Barrier(num_barriers=self.ring),
        }
        if cluster > 1:
            barriers["all_done"] = plgpu.ClusterBarrier(collective_axes=("share",))
            stores = self.geometry.value_dim // COLUMN_TILE + cluster
            barriers["shares_arrived"] = plgpu.Barrier(num_arrivals=stores)
        return barriers

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        names = ["q", *_ARRAYS, "out", *["lse"] * self.has_lse]
        found = dict(zip(names, refs, strict=True)) | scratch
        if not self.interpret:
            found["q_tile"], found["out_tile"] = scratch["queries"]
        if "tiles_or_shares" in scratch:
            found["tiles"], shares = scratch["tiles_or_shares"]
            found["out_shares"], found["lse_shares"] = shares
        warpgroup = lax.axis_index("warpgroup")
        for number, role in enumerate((KeysConsumer, KeysProducer)):

            @pl.when(warpgroup == number)
            def _(role: type[KeysConsumer | KeysProducer] = role) -> None:
                role(self, found, Piece(self, found)).run()
