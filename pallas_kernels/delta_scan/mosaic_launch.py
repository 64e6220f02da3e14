"""Launch of the `delta_scan` kernel on Hopper: grid, shared memory, mbarriers and warpgroups.

A block loops over the pieces of one row for one or two units of one head (a unit is 64 components of its values), with
the state in registers. Each consumer (mosaic_consumer.py) computes one unit; the first one keeps the pieces in flight
(mosaic_task.py). There is no warpgroup for copies alone, so each thread may have 255 registers with any JAX.

Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.delta_scan.mosaic_consumer import Consumer
from pallas_kernels.delta_scan.mosaic_geometry import SIDE, STAGES
from pallas_kernels.delta_scan.mosaic_kernel import SQUARE, TILED, Kernel
from pallas_kernels.delta_scan.mosaic_system import FACTORS
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref


def build(kernel: Kernel, tokens: int, num_tasks: int) -> Callable[..., Array]:
    """Returns the function of arrays and of the pool's ref that launches the kernel."""
    g = kernel.geometry
    return mosaic_kernel(
        partial(_body, kernel),
        out_type=jax.ShapeDtypeStruct((tokens, g.sizes.heads * g.sizes.value_dim), g.dtype),
        scratch_types=_scratch(kernel),
        grid=(num_tasks * g.blocks,),
        grid_names=("block",),
        num_threads=g.consumers,
        thread_name="warpgroup",
        # The kernel places its barriers between warps itself.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        interpret=kernel.interpret,
        kernel_name="delta_scan",
    )


def _scratch(kernel: Kernel) -> dict[str, Any]:
    g = kernel.geometry
    of_piece = plgpu.SMEM((STAGES, *SQUARE), g.dtype, transforms=TILED)
    # Queries, keys, each consumer's values, the piece's inverse, weights and factors.
    copies = 2 * g.squares + g.consumers + 3
    scratch: dict[str, Any] = {
        "q": kernel.squares(STAGES, g.squares),
        "k": kernel.squares(STAGES, g.squares),
        "v": kernel.squares(STAGES, g.consumers),
        "y": kernel.squares(g.consumers),
        "inverses": of_piece,
        "weights": of_piece,
        "factors": plgpu.SMEM((STAGES, FACTORS * SIDE), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        # The keys of a partial piece signal the first consumer, which zeroes what is past its end.
        "to_clear": plgpu.Barrier(num_arrivals=g.squares, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=g.consumers, num_barriers=STAGES),
    }
    if kernel.interpret:
        # The interpreter does not support accumulators.
        scratch["sums"] = plgpu.SMEM((g.consumers, 2 + g.squares, *SQUARE), jnp.float32)
    return scratch


def _body(kernel: Kernel, *refs: Ref, **scratch: Ref) -> None:
    names = ["qkv", "inverses_of", "weights_of", "factors_of", "tasks"]
    names += ["kept"] * kernel.has_snapshots
    found = dict(zip([*names, "states", "out"], refs, strict=True)) | scratch
    found = kernel.named(found, "q", "k", "v", "y")
    Consumer(kernel, found, lax.axis_index("warpgroup")).run()
