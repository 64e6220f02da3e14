"""Public entry point of `gathered_matmul`: each row times the matrices that it chooses."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from pallas_kernels.arguments.checks import check_ids, check_matrices
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import ordered
from pallas_kernels.gathered_matmul import mosaic_gpu, xla


def gathered_matmul(
    weight: Shaped[Array | np.ndarray, "some others inner"] | FewBits,
    x: Shaped[Array | np.ndarray, "rows inner"],
    chosen: Shaped[Array | np.ndarray, "rows count"],
    *,
    group_axis: int = 0,
    implementation: str | None = None,
) -> Float32[Array, "rows count out"]:
    """Computes `x[r] @ weight[chosen[r, c]].T` in float32: the experts of a few tokens.

    Each row reads the matrices of its own choices, so it suits few rows that choose among many matrices (Punica's
    BGMV, Chen et al., 2023). `grouped_matmul` reads a matrix once for all rows. A row's bits do not depend on others.

    Args:
        weight: [groups, out, inner], or [out, groups, inner] with `group_axis` 1. Any floating dtype, or 8 or 4 bits as
            `FewBits`, whose `order` is that of all groups or, [groups, inner], of each.
        x: in the weight's dtype; with `FewBits` any floating dtype.
        chosen: int32 groups of each row; checked for concrete arrays alone.
        group_axis: axis of the weight that counts its matrices, 0 or 1.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Raises:
        ValueError: shapes or dtypes do not fit, or a row chooses a group that is not there.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    _check(weight, x, chosen, group_axis)
    matrices, rows, ids = jax.tree.map(jnp.asarray, (weight, x, chosen))
    if isinstance(matrices, FewBits) and matrices.order is not None:
        matrices, (rows, ids) = replace(matrices, order=None), _ordered(rows, ids, matrices.order)
    reasons = {
        "mosaic_gpu": lambda: why_not_kernel(matrices, rows, ids, group_axis=group_axis),
        "xla": lambda: None,
    }
    is_ours = choose("gathered_matmul", reasons, implementation) == "mosaic_gpu"
    out = weight.shape[1 - group_axis]
    if not math.prod((*chosen.shape, *weight.shape)):
        return jnp.zeros((*chosen.shape, out), jnp.float32)
    found = (mosaic_gpu if is_ours else xla).gathered_matmul(
        matrices, rows, ids, group_axis=group_axis
    )
    return found.reshape(*chosen.shape, out)


def why_not_kernel(
    weight: ArrayOrStruct | FewBits, x: ArrayOrStruct, chosen: ArrayOrStruct, *, group_axis: int = 0
) -> str | None:
    """Returns why our kernel cannot multiply such arrays on the default device, or `None` if it can.

    Args:
        weight: as in `gathered_matmul`, or with a `jax.ShapeDtypeStruct` for each array.
        x: likewise.
        chosen: likewise.
        group_axis: as in `gathered_matmul`.
    """
    return mosaic_gpu.why_not(weight, x, chosen, group_axis=group_axis)


def _ordered(
    x: Float[Array, "rows inner"],
    chosen: Int32[Array, "rows count"],
    order: Int[Array, "*groups inner"],
) -> tuple[Float[Array, "some inner"], Int32[Array, "some any"]]:
    """Returns the columns of x in the order of the weight's columns, with a row for each choice if orders differ."""
    if order.ndim == 1:
        return ordered(x, order), chosen
    ids = chosen.reshape(-1)
    each = jnp.repeat(x, chosen.shape[1], axis=0)
    return jnp.take_along_axis(each, order[ids], axis=1, mode="clip"), ids[:, None]


def _check(
    weight: Array | np.ndarray | FewBits,
    x: Array | np.ndarray,
    chosen: Array | np.ndarray,
    group_axis: int,
) -> None:
    """Raises `ValueError` for arguments that do not fit each other."""
    check_matrices(weight, x, group_axis)
    check_ids("chosen", chosen, (x.shape[0], None))
    groups = weight.shape[group_axis]
    if isinstance(chosen, Tracer) or not chosen.size:
        return
    if (largest := int(np.max(np.asarray(chosen)))) >= groups:
        raise ValueError(f"there are {groups} groups, but a row chooses group {largest}")
