"""Launch of the MLA kernel on Hopper: grid, outputs, shared memory, mbarriers and warpgroups.

A block has three warpgroups. Two consumers (consumer.py) share 64 rows, which are heads of one or a few queries. Each
consumer computes the scores of every second tile of keys. Each multiplies the weights of all tiles by its half of the
values' columns, since 64 rows of 512 float32 outputs exceed the registers of one warpgroup. The producer, which the op
provides, keeps tiles in flight. A half of a tile is free as soon as the one consumer that multiplies it is done;
without a producer (`Kernel.has_producer`), that consumer then fetches the same half of a later tile.

Refs to whole arrays have the names of the arrays. `lo` and `hi` are the halves of a tile's values; `rope` is its rotary
part.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.latent_kernel.consumer import Follower, Leader
from pallas_kernels.latent_kernel.kernel import CONSUMERS, Kernel
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE
from pallas_kernels.mosaic.jax_versions import request_registers
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled

# Reductions along a row stay within four lanes and need no shared memory.
_REDUCTION_BYTES = 0


def build(kernel: Kernel, tokens: int) -> Callable[..., list[Array]]:
    """Returns the function of arrays that launches the kernel."""
    return mosaic_kernel(
        partial(_body, kernel),
        out_type=_out_type(kernel, tokens),
        scratch_types=_scratch(kernel),
        num_threads=CONSUMERS + kernel.has_producer,
        thread_name="warpgroup",
        # The kernel places its barriers between warps itself.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=_REDUCTION_BYTES,
        ),
        interpret=kernel.interpret,
        kernel_name=kernel.name,
        **_grid(kernel),
    )


def _grid(kernel: Kernel) -> dict[str, Any]:
    blocks, cluster = kernel.geometry.blocks, kernel.schedule.cluster
    grid = {"piece": kernel.pieces, "part": kernel.schedule.parts}
    clusters: dict[str, int] = {}
    if kernel.source.exchange is not None:
        assert cluster == 1, "blocks that share tiles are a cluster already"
        clusters = {"block": blocks}
    else:
        grid["block"] = blocks
        clusters = {"share": cluster} if cluster > 1 else {}
    shape = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
    if clusters:
        shape |= {"cluster": tuple(clusters.values()), "cluster_names": tuple(clusters)}
    return shape


def _out_type(kernel: Kernel, tokens: int) -> list[jax.ShapeDtypeStruct]:
    g, parts = kernel.geometry, kernel.schedule.parts
    places = (kernel.pieces, parts, g.blocks, WGMMA_ROWS)
    out_type = [jax.ShapeDtypeStruct((tokens * g.heads, g.value_dim), g.dtype)]
    if parts > 1:
        out_type = [jax.ShapeDtypeStruct((*places, g.value_dim), jnp.float32)]
    if kernel.has_lse:
        out_type.append(jax.ShapeDtypeStruct(places, jnp.float32))
    return out_type


def _scratch(kernel: Kernel) -> dict[str, Any]:
    g = kernel.geometry
    wide = swizzled(COLUMN_TILE, g.dtype)
    half = plgpu.SMEM((SLOTS, TILE, g.half), g.dtype, transforms=wide)
    rope = plgpu.SMEM((SLOTS, TILE, g.width - g.value_dim), g.dtype, transforms=wide)
    queries = plgpu.SMEM((1, WGMMA_ROWS, g.width), g.dtype, transforms=wide)
    columns = (g.value_dim // COLUMN_TILE, WGMMA_ROWS, COLUMN_TILE)
    out = plgpu.SMEM(columns, g.dtype, transforms=wide)
    scratch = {
        "p_tile": plgpu.SMEM((1, WGMMA_ROWS, TILE), g.dtype, transforms=wide),
        # Running maxima of both consumers, then their final sums.
        "stats": plgpu.SMEM((2 * CONSUMERS, WGMMA_ROWS), jnp.float32),
        **_barriers(kernel),
        **(kernel.source.exchange.scratch() if kernel.source.exchange is not None else {}),
    }
    if kernel.interpret:
        # The interpreter treats the members of a union as one buffer, and has no wgmma on registers.
        return scratch | {
            "lo": half,
            "hi": half,
            "rope": rope,
            "q_tile": queries,
            "out_tile": out,
            "scores": plgpu.SMEM((CONSUMERS, WGMMA_ROWS, TILE), jnp.float32),
            "acc": plgpu.SMEM((CONSUMERS, WGMMA_ROWS, g.half), jnp.float32),
        }
    scratch["queries"] = plgpu.RefUnion(queries, out)
    if kernel.schedule.cluster == 1:
        return scratch | {"lo": half, "hi": half, "rope": rope}
    shares = [
        plgpu.SMEM(
            (kernel.schedule.cluster, WGMMA_ROWS, width),
            jnp.float32,
            transforms=swizzled(piece, jnp.float32),
        )
        for width, piece in ((g.value_dim // kernel.schedule.cluster, 32), (ROW_TILE, ROW_TILE))
    ]
    return scratch | {"tiles_or_shares": plgpu.RefUnion((half, half, rope), tuple(shares))}


def _barriers(kernel: Kernel) -> dict[str, Any]:
    s = kernel.schedule
    free = plgpu.Barrier(num_barriers=SLOTS)
    # The last barriers of each are for values with hidden rows, which the one that fetches must zero first.
    arrived = [
        plgpu.Barrier(num_arrivals=count, num_barriers=SLOTS + kernel.edges)
        for count in kernel.source.arrivals
    ]
    barriers: dict[str, Any] = {
        "q_arrived": plgpu.Barrier(),
        "lo_arrived": arrived[0],
        "hi_arrived": arrived[1],
        "lo_free": free,
        "hi_free": free,
        "p_ready": plgpu.Barrier(num_barriers=CONSUMERS),
        "done": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    if s.cluster > 1:
        barriers["all_done"] = plgpu.ClusterBarrier(
            collective_axes=("share",), num_arrivals=CONSUMERS
        )
        barriers["shares_arrived"] = plgpu.Barrier(num_arrivals=2 * s.cluster)
    return barriers


def _body(kernel: Kernel, *refs: Ref, **scratch: Ref) -> None:
    names = ["q", *kernel.source.arrays, "out", *["lse"] * kernel.has_lse]
    found = dict(zip(names, refs, strict=True)) | scratch
    if not kernel.interpret:
        found["q_tile"], found["out_tile"] = scratch["queries"]
    if "tiles_or_shares" in scratch:
        tiles, shares = scratch["tiles_or_shares"]
        found["lo"], found["hi"], found["rope"] = tiles
        found["out_shares"], found["lse_shares"] = shares
    exchange = kernel.source.exchange
    if exchange is not None:
        exchange.begin(found)
    warpgroup = lax.axis_index("warpgroup")
    most, least = kernel.source.registers
    for number, consumer in enumerate((Leader, Follower)):

        @pl.when(warpgroup == number)
        def _(consumer: type[Leader | Follower] = consumer) -> None:
            request_registers(most, more=True)
            consumer(kernel, found, Piece(kernel.geometry, kernel.schedule, found)).run()

    if kernel.has_producer:

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            request_registers(least, more=False)
            piece = Piece(kernel.geometry, kernel.schedule, found)
            kernel.source.producer(kernel, found, piece).run()

    if exchange is not None:
        exchange.end()
