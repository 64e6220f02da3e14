"""The door to `grouped_matmul`: rows sorted by group, each times its group's matrix."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.grouped_matmul import mosaic_gpu, xla


def grouped_matmul(
    weight: Shaped[Array | np.ndarray, "some others inner"],
    x: Shaped[Array | np.ndarray, "rows inner"],
    group_sizes: Shaped[Array | np.ndarray, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """Computes `x[r] @ weight[group of r].T`, summed in float32: the products of a mixture of experts.

    Rows of a group lie together and groups in their order, so sizes say all. They may be anything that adds up to the
    number of rows: no rows, or all of them. What a row becomes depends on no other row, to the bit, nor on the sizes;
    but by `jax.lax.ragged_dot` ("xla") a NaN or infinity in the weights reaches rows of other groups.

    Args:
        weight: [groups, out, inner], one row for each column of the result, as Hugging Face has it; or
            [out, groups, inner] with `group_axis` 1.
        x: rows of weight's dtype, which is a floating one.
        group_sizes: int32, how many rows each group has. Inside a trace their sum is trusted.
        group_axis: which axis of the weight counts its matrices.
        result: dtype of the result; x's if `None`.
        implementation: "mosaic_gpu", "xla", or `None` for the better one that can run.

    Returns:
        The rows, rounded once.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the implementation asked for cannot run; the message says why.
    """
    _check(weight, x, group_sizes, group_axis)
    arrays = tuple(map(jnp.asarray, (weight, x, group_sizes)))
    options = {"group_axis": group_axis, "result": result}
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(*arrays[:2], **options),
        "xla": lambda: None,
    }
    chosen = choose("grouped_matmul", reasons, implementation)
    if not x.size or not weight.size:
        out = weight.shape[1 - group_axis]
        return jnp.zeros((x.shape[0], out), x.dtype if result is None else result)
    run = mosaic_gpu.grouped_matmul if chosen == "mosaic_gpu" else xla.grouped_matmul
    return run(*arrays, **options)


def _check(
    weight: Array | np.ndarray,
    x: Array | np.ndarray,
    group_sizes: Array | np.ndarray,
    group_axis: int,
) -> None:
    """Refuses what does not fit."""
    if group_axis not in (0, 1):
        raise ValueError(
            f"group_axis must be 0 or 1, since the last axis is summed, got {group_axis}"
        )
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (None, None, x.shape[1]))
    check_ids("group_sizes", group_sizes, (weight.shape[group_axis],))
    if not jnp.issubdtype(x.dtype, jnp.floating) or weight.dtype != x.dtype:
        raise ValueError(
            f"weight and x must share one floating dtype, got {weight.dtype} and {x.dtype}; cast x to the weight's"
        )
    if isinstance(group_sizes, Tracer):
        return
    total = int(np.sum(np.asarray(group_sizes)))
    if total != x.shape[0]:
        raise ValueError(
            f"group_sizes must add up to the {x.shape[0]} rows of x, got {total}; leave out rows of no group"
        )
