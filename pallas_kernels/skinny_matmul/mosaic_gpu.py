"""`skinny_matmul` on Hopper with a Mosaic GPU kernel: limits, and the XLA operations before and after the kernel.

The kernel's launch is in mosaic_launch.py, its schedule in mosaic_schedule.py; the kernel for more than 64 rows is in
mosaic_many_rows.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.argument_weights import are_arguments
from pallas_kernels.device import ROW_TILE, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import rounded_rows
from pallas_kernels.mosaic.activations import ACTIVATIONS, activated
from pallas_kernels.mosaic.jax_versions import overlaps_launches
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.skinny_matmul.mosaic_ending import Ending
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_launch import Kernel
from pallas_kernels.skinny_matmul.mosaic_many_rows import ManyRowsKernel, row_factors
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule
from pallas_kernels.skinny_matmul.mosaic_tiling import Tiling
from pallas_kernels.skinny_matmul.weighed import Weighed, inverse_root, weigh


def why_not(arrays: MatmulArrays, options: MatmulOptions) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can; reads shapes and dtypes only."""
    return why_not_mosaic() or refusal(arrays, options)


def refusal(arrays: MatmulArrays, options: MatmulOptions) -> str | None:
    """Returns why the kernel does not support these arrays on any device, or `None` if it does."""
    activation = options.activation
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    return Geometry.of(arrays.weight, arrays.x, gated=options.gated).refusal()


def skinny_matmul(
    arrays: MatmulArrays,
    options: MatmulOptions,
    *,
    schedule: Schedule | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "rows out"] | Weighed:
    """Implements `api.skinny_matmul`, with the schedule and the tiling for its shapes unless they are given.

    More than 64 rows are multiplied by the kernel of mosaic_many_rows.py in tiles: times a weight of 16 bits, under the
    fixed order of sums with the same bits, and in any order times a weight in few bits.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; reads out of bounds raise, and races
    are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes, or the given schedule does not fit them.
    """
    weight, x, bias, residual, squares, next_norm = arrays
    geometry = Geometry.of(weight, x, gated=options.gated)
    schedule = _runnable(geometry, schedule, refusal(arrays, options))
    if interpret:
        # The interpreter does not support a cluster's stores, so XLA adds up the shares, in the same order.
        schedule = replace(schedule, cluster=1, splits=schedule.shares)
    # Tiles of few bits have another order of sums than few rows, and a gated tile of few rows adds up the squares of
    # more columns than a consumer of many rows has.
    in_groups = geometry.packing is not None or (geometry.gated and next_norm is not None)
    part, adds_up = schedule.columns, schedule.splits == 1
    if len(x) > geometry.rows and not (is_fixed() and in_groups):
        tiling = tiling or Tiling.by_rule(geometry, len(x))
        check_kernel(tiling.refusal(geometry))
        own = tiling.own_columns(geometry)
        part, adds_up = min(part, own) if is_fixed() else own, True
    else:
        tiling = None
    # If parts do not divide the columns, the last tile overlaps its neighbour and some squares would count twice.
    whole = adds_up and geometry.out % part == 0
    ending = Ending(
        result=x.dtype if options.result is None else jnp.dtype(options.result),
        activation=options.activation,
        gate_multiplier=options.gate_multiplier,
        norm_eps=None if squares is None else options.norm_eps,
        has_bias=bias is not None,
        has_residual=residual is not None,
        weighs=next_norm is not None and whole,
        norm_row=options.norm_row,
        scales_rows=geometry.rounds_rows,
    )
    extras = {
        "squares": squares,
        "bias": bias,
        "residual": residual,
        "next_norm": next_norm if ending.weighs else None,
    }
    early = are_arguments() and overlaps_launches()
    plan = {"geometry": geometry, "ending": ending, "interpret": interpret, "early": early}
    if tiling is not None:
        found = multiply_many_rows(weight, x, extras, **plan, tiling=tiling, part=part)
    else:
        found = multiply(weight, x, extras, **plan, schedule=schedule)
    if next_norm is None:
        return found[0]
    return Weighed(*found) if ending.weighs else weigh(found[0], next_norm[options.norm_row])


def _runnable(geometry: Geometry, schedule: Schedule | None, problem: str | None) -> Schedule:
    """Returns the given schedule, or that for these sizes; raises `ValueError` if the kernel cannot run under it."""
    check_kernel(problem)
    schedule = schedule or Schedule.of(geometry)
    check_kernel(schedule.refusal(geometry))
    return schedule


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("schedule", "geometry", "ending", "interpret", "early"))
def multiply(
    weight: Shaped[Array, "weights inner"] | FewBits,
    x: Float[Array, "rows inner"],
    extras: Mapping[str, Array | None],
    *,
    schedule: Schedule,
    geometry: Geometry,
    ending: Ending,
    interpret: bool = False,
    early: bool = False,
) -> list[Array]:
    """Runs the kernel under a schedule, and adds up the results of its splits in order."""
    rows, groups = len(x), ceil(len(x) / geometry.rows)
    if groups > 1:
        x, extras = _padded(x, extras, groups * geometry.rows)
    elif interpret or geometry.padded_rows > ROW_TILE:
        # TMA zero-fills rows past the end only within a single tile of 8, and the interpreter not at all.
        x = jnp.pad(x, ((0, geometry.padded_rows - geometry.rows), (0, 0)))
    in_kernel = ending if schedule.splits == 1 else Ending(jnp.float32)
    kernel = Kernel(geometry, schedule, in_kernel, groups, early).build(interpret)
    found = kernel(*jax.tree.leaves(weight), x, *(extras[name] for name in in_kernel.inputs))
    if groups > 1:
        return _first_rows(found, rows)
    if schedule.splits == 1:
        return found
    [shares] = found
    total = sum((shares[split] for split in range(1, schedule.splits)), shares[0])
    return [_ended(total, extras, geometry, ending)]


@partial(jax.jit, static_argnames=("geometry", "ending", "tiling", "part", "interpret", "early"))
def multiply_many_rows(
    weight: Shaped[Array, "weights inner"] | FewBits,
    x: Float[Array, "rows inner"],
    extras: Mapping[str, Array | None],
    *,
    geometry: Geometry,
    ending: Ending,
    tiling: Tiling,
    part: int,
    interpret: bool = False,
    early: bool = False,
) -> list[Array]:
    """Runs the kernel for many rows; `part` is the columns over which the squares of a row are added up."""
    rows, padded_rows = len(x), ceil(len(x) / ROW_TILE) * ROW_TILE
    x, extras = _padded(x, extras, padded_rows)
    factors = None
    if extras["squares"] is not None:
        factors = row_factors(extras["squares"], geometry, ending, interpret=interpret)
    if ending.scales_rows:
        x, scales = rounded_rows(x)
        factors = scales if factors is None else factors * scales
    if interpret:
        # The interpreter's copies do not fill rows past the end.
        x, extras = _padded(x, extras, tiling.row_tiles(padded_rows) * tiling.rows)
    inputs = {name: factors if name == "squares" else extras[name] for name in ending.inputs}
    residual = extras["residual"]
    staged = None if residual is None or residual.dtype.itemsize > 2 else residual.dtype
    kernel = ManyRowsKernel(geometry, padded_rows, tiling, ending, part, staged, early)
    run = kernel.build(interpret)
    return _first_rows(run(*jax.tree.leaves(weight), x, *inputs.values()), rows)


def _first_rows(found: list[Array], rows: int) -> list[Array]:
    """Returns the outputs of a kernel for its first rows."""
    out, *more = found
    return [
        out[:rows],
        *(array[:rows] for array in more[:1]),
        *(array[:, :rows] for array in more[1:]),
    ]


def _padded(
    x: Float[Array, "rows inner"], extras: Mapping[str, Array | None], rows: int
) -> tuple[Float[Array, "padded_rows inner"], dict[str, Array | None]]:
    """Returns x, and the inputs of the epilogue that have its rows, padded to `rows` rows."""
    more = rows - len(x)
    padding = {
        "residual": ((0, more), (0, 0)),
        "squares": ((0, 0), (0, more)),
    }
    padded = {
        name: array if array is None or name not in padding else jnp.pad(array, padding[name])
        for name, array in extras.items()
    }
    return jnp.pad(x, ((0, more), (0, 0))), padded


def _ended(
    total: Float[Array, "rows weights"],
    extras: Mapping[str, Array | None],
    geometry: Geometry,
    ending: Ending,
) -> Float[Array, "rows out"]:
    """Runs the epilogue in XLA, for splits."""
    squares, bias, residual = (extras[name] for name in ("squares", "bias", "residual"))
    if squares is not None and ending.norm_eps is not None:
        total *= inverse_root(squares, geometry.inner, ending.norm_eps)
    if bias is not None:
        total += bias.astype(jnp.float32)[None]
    gates, *ups = jnp.split(total, geometry.parts, axis=1)
    gates = activated(gates * ending.gate_multiplier, ending.activation)
    for up in ups:
        gates *= up
    if residual is not None:
        gates += residual.astype(jnp.float32)
    return gates.astype(ending.result)
