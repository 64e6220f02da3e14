"""Launch of the `ssd_scan` kernel on Hopper: grid, shared memory, mbarriers and warpgroups.

A block loops over the pieces of one row for one or two units of one group (a unit is 64 components of a head), with the
state in registers. Each consumer (mosaic_consumer.py) computes one unit. The producer (mosaic_producer.py) keeps the
pieces' tokens in flight, with B and C once for all units, and computes the tokens' weights.

Rows start anywhere, but copies into tiled shared memory must start at a multiple of 8 rows. So tokens are copied into a
view that is swizzled and not tiled, and wgmma reads a tiled view; both views have the same bytes.

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

from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled, untiled_swizzle
from pallas_kernels.ssd_scan.mosaic_consumer import Consumer
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_producer import Producer
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE

# Transforms of 64 x 64 squares of 16-bit elements: the view for copies, and the view for products.
_SWIZZLED, _TILED = untiled_swizzle(128), swizzled(SIDE, jnp.bfloat16)


def build(kernel: Kernel, tokens: int, num_tasks: int) -> Callable[..., Array]:
    """Returns the function of arrays and of the pool's ref that launches the kernel."""
    g, s = kernel.geometry, kernel.schedule
    return mosaic_kernel(
        partial(_body, kernel),
        out_type=jax.ShapeDtypeStruct((tokens, g.sizes.d_inner), g.dtype),
        scratch_types=_scratch(kernel),
        grid=(num_tasks * g.packs(s.consumers),),
        grid_names=("block",),
        num_threads=s.consumers + 1,
        thread_name="warpgroup",
        # The kernel places its barriers between warps itself.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        interpret=kernel.interpret,
        kernel_name="ssd_scan",
    )


def _scratch(kernel: Kernel) -> dict[str, Any]:
    g, s = kernel.geometry, kernel.schedule
    square = (SIDE, SIDE)
    copied = {
        "b": (s.stages, g.blocks, *square),
        "c": (s.stages, g.blocks, *square),
        "x": (s.stages, s.consumers, *square),
        "y": (s.consumers, *square),
    }
    scratch: dict[str, Any] = {
        "weights": plgpu.SMEM((s.consumers, 1 + s.exact, *square), g.dtype, transforms=_TILED),
        "factors": plgpu.SMEM((s.consumers, 2 * SIDE), jnp.float32),
        "decay": plgpu.SMEM((s.stages, s.consumers, 2 * SIDE), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=2 * (g.blocks + s.consumers), num_barriers=s.stages),
        # B and x of a partial piece signal the producer, which zeroes the rows past the piece's end.
        "to_clear": plgpu.Barrier(num_arrivals=g.blocks + s.consumers, num_barriers=s.stages),
        "weighed": plgpu.Barrier(num_barriers=s.consumers),
        "weights_free": plgpu.Barrier(num_barriers=s.consumers),
        "free": plgpu.Barrier(num_arrivals=s.consumers, num_barriers=s.stages),
    }
    if kernel.interpret:
        # The interpreter does not support accumulators.
        sums = (s.consumers + 1, 1 + g.blocks, *square)
        scratch["sums"] = plgpu.SMEM(sums, jnp.float32)
    for name, shape in copied.items():
        if kernel.interpret:
            # The interpreter treats the members of a union as one buffer.
            scratch[name] = plgpu.SMEM(shape, g.dtype)
            continue
        views = [plgpu.SMEM(shape, g.dtype, transforms=form) for form in (_SWIZZLED, _TILED)]
        views += [plgpu.SMEM(shape, g.dtype)] if name == "y" else []
        scratch[name] = plgpu.RefUnion(*views)
    return scratch


def _body(kernel: Kernel, *refs: Ref, **scratch: Ref) -> None:
    names = ["xbc", "decays", "d", "tasks"] + ["kept"] * kernel.has_snapshots
    found = dict(zip([*names, "states", "out"], refs, strict=True)) | scratch
    for name in ("b", "c", "x", "y"):
        views = (found[name],) * 3 if kernel.interpret else tuple(found[name])
        # The views for whole copies, for products and register loads, and for copies of single rows.
        found |= dict(zip((f"{name}_copied", name, f"{name}_rows"), views, strict=False))
    warpgroup = lax.axis_index("warpgroup")
    is_consumer = warpgroup < kernel.schedule.consumers
    pl.when(is_consumer)(lambda: Consumer(kernel, found, warpgroup).run())
    pl.when(~is_consumer)(lambda: Producer(kernel, found, warpgroup).run())
