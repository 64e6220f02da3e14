"""Launch of the `ragged_attention` kernel on Hopper: grid, outputs, shared memory, mbarriers and warpgroups.

A block has three warpgroups: two consumers (mosaic_consumer.py) of 64 query rows each, and a producer
(mosaic_producer.py) that keeps tiles of keys and values in flight for both. A piece of work (mosaic_piece.py) is one
tile of tokens and one pack of heads. The rows of a consumer are its tokens for the pack's first head, then for the
second, and so on. All three warpgroups loop over the same pieces, and within a piece over the same tiles of keys.
Without a producer (`Kernel.has_producer`), the second consumer does its work.

Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.mosaic.jax_versions import request_registers
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled
from pallas_kernels.ragged_attention.mosaic_consumer import Consumer
from pallas_kernels.ragged_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_attention.mosaic_producer import Producer
from pallas_kernels.ragged_attention.mosaic_schedule import CONSUMERS

# Registers per thread (setmaxnreg). Each of the three warpgroups starts with 168; a total above 504 would wait forever.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


def build(kernel: Kernel, tokens: int) -> Callable[..., list[Array]]:
    """Returns the function of arrays that launches the kernel."""
    g = kernel.geometry
    out_type = [jax.ShapeDtypeStruct((tokens, g.heads, g.head_dim), g.dtype)]
    if kernel.has_lse:
        shape = (kernel.num_tiles, g.units, CONSUMERS, WGMMA_ROWS)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    return mosaic_kernel(
        partial(_body, kernel),
        out_type=out_type,
        scratch_types=_scratch(kernel),
        grid=(kernel.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + kernel.has_producer,
        thread_name="warpgroup",
        # The kernel places its barriers between warps itself.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=kernel.interpret,
        kernel_name="ragged_attention",
    )


def _scratch(kernel: Kernel) -> dict[str, Any]:
    g, s = kernel.geometry, kernel.schedule
    wide = swizzled(g.head_dim, g.dtype)
    tiles = plgpu.SMEM((s.stages, s.keys, g.head_dim), g.dtype, transforms=wide)
    rows = (s.query_slots, CONSUMERS, WGMMA_ROWS, g.head_dim)
    copies = s.keys // g.copy_height(s.keys)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.stages)
    scratch = {
        "q_tiles": plgpu.SMEM(rows, g.dtype, transforms=wide),
        "out_rows": plgpu.SMEM(rows, g.dtype),
        "k_tiles": tiles,
        "v_tiles": tiles,
        "q_arrived": plgpu.Barrier(num_arrivals=CONSUMERS * g.pack, num_barriers=s.query_slots),
        "q_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=s.query_slots),
        "k_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        # The last barriers are for tiles of values with hidden rows, which the one that fetches must zero first.
        "v_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages + kernel.edges),
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_barriers=CONSUMERS),
    }
    if not kernel.interpret:
        # The output is staged in the queries' memory: swizzled for whole tiles, plain if it is stored row by row. The
        # interpreter treats the members of a union as one buffer, so it gets separate buffers.
        both = [scratch.pop(name) for name in ("q_tiles", "out_rows")]
        scratch["queries"] = plgpu.RefUnion(*both)
    else:
        # The interpreter has no wgmma on registers, so its accumulators are in shared memory.
        scratch["scores"] = plgpu.SMEM((CONSUMERS, WGMMA_ROWS, s.keys), jnp.float32)
        scratch["acc"] = plgpu.SMEM((CONSUMERS, WGMMA_ROWS, g.head_dim), jnp.float32)
    return scratch


def _body(kernel: Kernel, *refs: Ref, **scratch: Ref) -> None:
    names = ["q", "k_pages", "v_pages", "page_table", "tiles", "num_tiles"]
    names += ["k_scales", "v_scales"] * kernel.geometry.scaled
    names += ["sinks"] * kernel.has_sinks + ["out"] + ["lse"] * kernel.has_lse
    found = dict(zip(names, refs, strict=True)) | scratch
    if not kernel.interpret:
        found["q_tiles"], found["out_rows"] = scratch["queries"]
    warpgroup = lax.axis_index("warpgroup")

    if not kernel.has_producer:
        Consumer(kernel, found, warpgroup).run()
        return

    @pl.when(warpgroup < CONSUMERS)
    def _() -> None:
        request_registers(_CONSUMER_REGISTERS, more=True)
        Consumer(kernel, found, warpgroup).run()

    @pl.when(warpgroup == CONSUMERS)
    def _() -> None:
        request_registers(_PRODUCER_REGISTERS, more=False)
        Producer(kernel, found).run()
