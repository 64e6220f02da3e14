"""`grouped_matmul` on Hopper with a Mosaic GPU kernel: limits, and the XLA operations before the kernel.

The kernel is in mosaic_kernel.py, its schedule in mosaic_schedule.py and mosaic_visits.py. MXFP4 with few rows per
group has another kernel, in mosaic_mxfp4.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.grouped_matmul import mosaic_mxfp4
from pallas_kernels.grouped_matmul.mosaic_kernel import Kernel
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule
from pallas_kernels.grouped_matmul.mosaic_visits import table


def why_not(
    weight: ArrayOrStruct | FewBits,
    x: ArrayOrStruct,
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(weight, x, group_axis=group_axis, result=result)


def refusal(
    weight: ArrayOrStruct | FewBits,
    x: ArrayOrStruct,
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> str | None:
    """Returns why the kernel does not support these arrays on any device, or `None` if it does."""
    return Geometry.of(weight, x, group_axis=group_axis, result=result).refusal()


def grouped_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
    schedule: Schedule | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """Implements `api.grouped_matmul`, with the schedule for its shapes unless one is given.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; reads out of bounds raise, and races
    are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes, or the given schedule does not fit them.
    """
    geometry = Geometry.of(weight, x, group_axis=group_axis, result=result)
    check_kernel(geometry.refusal())
    plan = mosaic_mxfp4.Plan.of(geometry) if schedule is None else None
    if plan is not None:
        return mosaic_mxfp4.grouped_matmul(
            weight, x, group_sizes, geometry=geometry, plan=plan, interpret=interpret
        )
    schedule = schedule or Schedule.by_rule(geometry)
    check_kernel(schedule.refusal(geometry))
    options = {"geometry": geometry, "schedule": schedule, "interpret": interpret}
    return _multiply(weight, x, group_sizes, **options)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("geometry", "schedule", "interpret"))
def _multiply(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows inner"],
    group_sizes: Int[Array, " groups"],
    *,
    geometry: Geometry,
    schedule: Schedule,
    interpret: bool,
) -> Float[Array, "rows out"]:
    """Pads x to whole windows and launches the kernel."""
    missing = schedule.padded_rows(geometry) - geometry.rows
    x = jnp.pad(x, ((0, missing), (0, 0))) if missing else x
    visits = table(group_sizes, geometry, schedule, interpret=interpret)
    codes, *factors = jax.tree.leaves(weight)
    # One axis of rows; `Block.factors_of` indexes it.
    factors = [array.reshape(-1, array.shape[-1]) for array in factors]
    return Kernel(geometry, schedule).build(interpret)(codes, *factors, x, visits)
