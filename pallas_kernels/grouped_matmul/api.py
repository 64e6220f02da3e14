"""Public entry point of `grouped_matmul`: rows sorted by group, each times its group's matrix."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_ids, check_shape
from pallas_kernels.arrays import ArrayOrStruct
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
    """Computes `x[r] @ weight[group of r].T`, accumulated in float32: the products of a mixture of experts.

    Rows are sorted by group, so the groups' sizes define the group of each row. Sizes may be 0, and must add up to the
    number of rows. A row's bits depend neither on other rows nor on the sizes. In "xla" (`jax.lax.ragged_dot`),
    however, a NaN or infinity in a group's weights also affects rows of other groups.

    Args:
        weight: [groups, out, inner], one row for each column of the result, as in Hugging Face checkpoints; or
            [out, groups, inner] with `group_axis` 1. Any floating dtype.
        x: [rows, inner], in the weight's dtype.
        group_sizes: int32 number of rows of each group. Their sum is not checked under a trace.
        group_axis: axis of the weight that counts its matrices, 0 or 1.
        result: dtype of the result; x's if `None`.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        [rows, out], rounded once.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    _check(weight, x, group_sizes, group_axis)
    arrays = tuple(map(jnp.asarray, (weight, x, group_sizes)))
    options = {"group_axis": group_axis, "result": result}
    reasons = {
        "mosaic_gpu": lambda: why_not_kernel(*arrays[:2], **options),
        "xla": lambda: None,
    }
    chosen = choose("grouped_matmul", reasons, implementation)
    if not x.size or not weight.size:
        out = weight.shape[1 - group_axis]
        return jnp.zeros((x.shape[0], out), x.dtype if result is None else result)
    run = mosaic_gpu.grouped_matmul if chosen == "mosaic_gpu" else xla.grouped_matmul
    return run(*arrays, **options)


def why_not_kernel(
    weight: ArrayOrStruct,
    x: ArrayOrStruct,
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> str | None:
    """Returns why our kernel cannot multiply such arrays on the default device, or `None` if it can.

    Callers that have an alternative to rows sorted by group use it to choose between the two.

    Args:
        weight: as in `grouped_matmul`, or its `jax.ShapeDtypeStruct`.
        x: likewise.
        group_axis: as in `grouped_matmul`.
        result: as in `grouped_matmul`.
    """
    return mosaic_gpu.why_not(weight, x, group_axis=group_axis, result=result)


def _check(
    weight: Array | np.ndarray,
    x: Array | np.ndarray,
    group_sizes: Array | np.ndarray,
    group_axis: int,
) -> None:
    """Raises `ValueError` for arguments that do not fit each other."""
    if group_axis not in (0, 1):
        raise ValueError(
            f"group_axis must be 0 or 1, since the last axis is contracted, got {group_axis}"
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
            f"group_sizes must add up to the {x.shape[0]} rows of x, got {total}; drop rows without a group from x"
        )
