"""Launch of the Mosaic GPU kernel of `latent_attention` for one query per row with few heads.

The left operand of wgmma has 64 rows, of which 16 heads would fill a quarter. So keys, and components of values, are on
the left, and queries on the right. A block has a consumer warpgroup (mosaic_keys_consumer.py) and a producer warpgroup
(mosaic_keys_producer.py). A tile of 64 keys is split into pieces of columns. As many pieces as fit form a ring buffer,
so that each piece is released as soon as it is multiplied.

Refs to whole arrays have the names of the arrays; `tiles` is the ring of pieces.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_attention.mosaic_keys_consumer import KeysConsumer
from pallas_kernels.latent_attention.mosaic_keys_producer import KeysProducer
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, TILE
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled

# Shared memory for the maximum over rows, which is a reduction across warps.
_REDUCTION_BYTES = 2048
_ARRAYS = ("latent_pages", "page_table", "seq_lens")


def build(kernel: KeysKernel, tokens: int) -> Callable[..., list[Array]]:
    """Returns the function of arrays that launches the kernel."""
    s = kernel.schedule
    clusters: dict[str, Any] = {}
    if s.cluster > 1:
        clusters = {"cluster": (s.cluster,), "cluster_names": ("share",)}
    return mosaic_kernel(
        partial(_body, kernel),
        out_type=_out_type(kernel, tokens),
        scratch_types=_scratch(kernel),
        grid=(kernel.pieces, s.parts, 1),
        grid_names=("piece", "part", "block"),
        num_threads=2,
        thread_name="warpgroup",
        # The kernel places its barriers between warps itself.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
        ),
        interpret=kernel.interpret,
        kernel_name="latent_attention",
        **clusters,
    )


def _out_type(kernel: KeysKernel, tokens: int) -> list[jax.ShapeDtypeStruct]:
    g, parts = kernel.geometry, kernel.schedule.parts
    places = (kernel.pieces, parts, 1)
    out_type = [jax.ShapeDtypeStruct((tokens * g.heads, g.value_dim), g.dtype)]
    if parts > 1:
        out_type = [jax.ShapeDtypeStruct((*places, g.value_dim, g.heads), jnp.float32)]
    if kernel.has_lse:
        out_type.append(jax.ShapeDtypeStruct((*places, g.heads), jnp.float32))
    return out_type


def _scratch(kernel: KeysKernel) -> dict[str, Any]:
    g = kernel.geometry
    wide = swizzled(COLUMN_TILE, g.dtype)
    tiles = plgpu.SMEM((kernel.ring, TILE, kernel.widths[0]), g.dtype, transforms=wide)
    queries = plgpu.SMEM((1, g.heads, g.width), g.dtype, transforms=wide)
    columns = (g.value_dim // COLUMN_TILE, g.heads, COLUMN_TILE)
    out = plgpu.SMEM(columns, g.dtype, transforms=wide)
    p_tile = plgpu.SMEM((1, g.heads, TILE), g.dtype, transforms=wide)
    scratch = {"p_tile": p_tile, **_barriers(kernel)}
    if kernel.interpret:
        # The interpreter treats the members of a union as one buffer, and has no wgmma on registers.
        return scratch | {
            "tiles": tiles,
            "q_tile": queries,
            "out_tile": out,
            "scores": plgpu.SMEM((TILE, g.heads), jnp.float32),
            "acc": plgpu.SMEM((g.value_dim, g.heads), jnp.float32),
        }
    scratch["queries"] = plgpu.RefUnion(queries, out)
    cluster = kernel.schedule.cluster
    if cluster == 1:
        return scratch | {"tiles": tiles}
    shares = [
        plgpu.SMEM(
            (cluster, height, g.heads), jnp.float32, transforms=swizzled(ROW_TILE, jnp.float32)
        )
        for height in (g.value_dim // cluster, TILE)
    ]
    return scratch | {"tiles_or_shares": plgpu.RefUnion(tiles, tuple(shares))}


def _barriers(kernel: KeysKernel) -> dict[str, Any]:
    cluster, copies = kernel.schedule.cluster, kernel.geometry.copies_per_tile
    # The last barriers are the producer's own, for pieces with hidden rows that it must zero first.
    arrived = kernel.ring + len(kernel.widths)
    barriers: dict[str, Any] = {
        "q_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=arrived),
        "free": plgpu.Barrier(num_barriers=kernel.ring),
    }
    if cluster > 1:
        barriers["all_done"] = plgpu.ClusterBarrier(collective_axes=("share",))
        stores = kernel.geometry.value_dim // COLUMN_TILE + cluster
        barriers["shares_arrived"] = plgpu.Barrier(num_arrivals=stores)
    return barriers


def _body(kernel: KeysKernel, *refs: Ref, **scratch: Ref) -> None:
    names = ["q", *_ARRAYS, "out", *["lse"] * kernel.has_lse]
    found = dict(zip(names, refs, strict=True)) | scratch
    if not kernel.interpret:
        found["q_tile"], found["out_tile"] = scratch["queries"]
    if "tiles_or_shares" in scratch:
        found["tiles"], shares = scratch["tiles_or_shares"]
        found["out_shares"], found["lse_shares"] = shares
    warpgroup = lax.axis_index("warpgroup")
    for number, role in enumerate((KeysConsumer, KeysProducer)):

        @pl.when(warpgroup == number)
        def _(role: type[KeysConsumer | KeysProducer] = role) -> None:
            role(kernel, found, Piece(kernel.geometry, kernel.schedule, found)).run()
