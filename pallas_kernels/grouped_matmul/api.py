"""Public entry point of `grouped_matmul`: rows sorted by group, each times its group's matrix."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arguments.checks import check_ids, check_matrices
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import ordered
from pallas_kernels.grouped_matmul import mosaic_gpu, xla


def grouped_matmul(
    weight: Shaped[Array | np.ndarray, "some others inner"] | FewBits,
    x: Shaped[Array | np.ndarray, "rows inner"],
    group_sizes: Shaped[Array | np.ndarray, " groups"],
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """Computes `x[r] @ weight[group of r].T`, accumulated in float32: the products of a mixture of experts.

    Rows are sorted by group, so the groups' sizes define the group of each row. Sizes may be 0, and must add up to the
    number of rows. A row's bits depend neither on other rows nor on the sizes; the number of all rows may change them,
    unless the order of sums is fixed. In "xla" (`jax.lax.ragged_dot`), however, a NaN or infinity in a group's weights
    also affects rows of other groups, unless they are in few bits.

    Args:
        weight: [groups, out, inner], one row for each column of the result, as in Hugging Face checkpoints; or
            [out, groups, inner] with `group_axis` 1. Any floating dtype, or 8 or 4 bits as `FewBits`, whose `order` is
            that of all groups or, [groups, inner], of each. Scales of MXFP4 above 2**33 may make NaN, and
            products with scales below 2**-93 may lose places.
        x: [rows, inner], in the weight's dtype; with `FewBits` any floating dtype.
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
    matrices, rows, sizes = jax.tree.map(jnp.asarray, (weight, x, group_sizes))
    if isinstance(matrices, FewBits):
        matrices, rows = replace(matrices, order=None), _ordered(rows, matrices.order, sizes)
    options = {"group_axis": group_axis, "result": result}
    reasons = {
        "mosaic_gpu": lambda: why_not_kernel(matrices, rows, **options),
        "xla": lambda: None,
    }
    chosen = choose("grouped_matmul", reasons, implementation)
    if not x.size or not math.prod(weight.shape):
        out = weight.shape[1 - group_axis]
        return jnp.zeros((x.shape[0], out), x.dtype if result is None else result)
    if chosen == "mosaic_gpu":
        return mosaic_gpu.grouped_matmul(matrices, rows, sizes, **options)
    return xla.grouped_matmul(matrices, rows, sizes, **options)


def why_not_kernel(
    weight: ArrayOrStruct | FewBits,
    x: ArrayOrStruct,
    *,
    group_axis: int = 0,
    result: DTypeLike | None = None,
) -> str | None:
    """Returns why our kernel cannot multiply such arrays on the default device, or `None` if it can.

    Callers that have an alternative to rows sorted by group use it to choose between the two.

    Args:
        weight: as in `grouped_matmul`, or with a `jax.ShapeDtypeStruct` for each array.
        x: likewise.
        group_axis: as in `grouped_matmul`.
        result: as in `grouped_matmul`.
    """
    return mosaic_gpu.why_not(weight, x, group_axis=group_axis, result=result)


def _ordered(
    x: Float[Array, "rows inner"],
    order: Int[Array, "*groups inner"] | None,
    sizes: Int[Array, " groups"],
) -> Float[Array, "rows inner"]:
    """Returns the columns of x in the order of its weight's columns, or of those of each row's group."""
    if order is None or order.ndim == 1:
        return ordered(x, order)
    groups = jnp.sum(jnp.arange(x.shape[0])[:, None] >= jnp.cumsum(sizes)[None], axis=1)
    groups = jnp.minimum(groups, sizes.shape[0] - 1)
    return jnp.take_along_axis(x, order[groups], axis=1, mode="clip")


def _check(
    weight: Array | np.ndarray | FewBits,
    x: Array | np.ndarray,
    group_sizes: Array | np.ndarray,
    group_axis: int,
) -> None:
    """Raises `ValueError` for arguments that do not fit each other."""
    check_matrices(weight, x, group_axis)
    check_ids("group_sizes", group_sizes, (weight.shape[group_axis],))
    if isinstance(group_sizes, Tracer):
        return
    total = int(np.sum(np.asarray(group_sizes)))
    if total != x.shape[0]:
        raise ValueError(
            f"group_sizes must add up to the {x.shape[0]} rows of x, got {total}; drop rows without a group from x"
        )
