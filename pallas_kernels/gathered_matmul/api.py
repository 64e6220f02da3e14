"""Public entry point of `gathered_matmul`: each row times the matrices that it chooses, or the sum over them."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32, Shaped

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.arguments.checks import check_ids, check_matrices, check_shape
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import ordered
from pallas_kernels.gathered_matmul import mosaic_gpu, xla
from pallas_kernels.gathered_matmul.epilogue import Epilogue


def gathered_matmul(
    weight: Shaped[Array | np.ndarray, "some others inner"] | FewBits,
    x: Shaped[Array | np.ndarray, "rows_of_x inner"],
    chosen: Shaped[Array | np.ndarray, "rows count"],
    *,
    weights: Shaped[Array | np.ndarray, "rows count"] | None = None,
    bias: Shaped[Array | np.ndarray, "groups out"] | None = None,
    group_axis: int = 0,
    activation: str | None = None,
    gated: bool = False,
    clamp: float | None = None,
    result: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "rows *count columns"]:
    """Computes `activation(x[r] @ weight[chosen[r, c]].T + bias[chosen[r, c]])`: the experts of a few tokens.

    Each row reads the matrices of its own choices, so it suits few rows that choose among many matrices (Punica's
    BGMV, Chen et al., 2023). `grouped_matmul` reads a matrix once for all rows. All is computed in float32. A row's
    bits do not depend on others. A token's experts are a call with an activation, then one with `weights`.

    Args:
        weight: [groups, out, inner], or [out, groups, inner] with `group_axis` 1. Any floating dtype, or 8 or 4 bits as
            `FewBits`, whose `order` is that of all groups or, [groups, inner], of each.
        x: in the weight's dtype; with `FewBits` any floating dtype. A row for each row of `chosen`, or for each choice.
        chosen: int32 groups of each row; checked for concrete arrays alone.
        weights: float32 factors. The result is then the sum over a row's choices, each times its factor: [rows, out].
        bias: one value per row of each matrix, in float32, bfloat16 or float16.
        group_axis: axis of the weight that counts its matrices, 0 or 1.
        activation: a name in `pallas_kernels.activations.ACTIVATIONS`; `None` for none.
        gated: whether the result is `activation(gates) * others`: a matrix has the rows of all gates, then as many
            others, and the result half as many columns.
        clamp: computes `pallas_kernels.activations.clamped_gate` with this limit as the activation, if given.
        result: dtype of the result.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or a row chooses a group that is not there.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    epilogue = Epilogue(activation, gated, clamp, jnp.dtype(result))
    _check(weight, x, chosen, bias, weights, group_axis, epilogue)
    given = jax.tree.map(jnp.asarray, (weight, x, chosen, bias, weights))
    matrices, rows, ids, added, shares = given
    columns = epilogue.columns(weight.shape[1 - group_axis])
    shape = (*(chosen.shape if weights is None else chosen.shape[:1]), columns)
    if not math.prod((*shape, *chosen.shape, weight.shape[group_axis])):
        return jnp.zeros(shape, result)
    if isinstance(matrices, FewBits) and matrices.order is not None:
        matrices, rows = replace(matrices, order=None), _ordered(rows, ids, matrices.order)
    reasons = {
        "mosaic_gpu": lambda: why_not_kernel(matrices, rows, ids, group_axis=group_axis),
        "xla": lambda: None,
    }
    is_ours = choose("gathered_matmul", reasons, implementation) == "mosaic_gpu"
    found = (mosaic_gpu if is_ours else xla).gathered_matmul(
        matrices, rows, ids, added, shares, group_axis=group_axis, epilogue=epilogue
    )
    return found.reshape(shape)


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
    x: Float[Array, "rows_of_x inner"],
    chosen: Int32[Array, "rows count"],
    order: Int[Array, "*groups inner"],
) -> Float[Array, "some inner"]:
    """Returns the columns of x in the order of the weight's columns, with a row for each choice if orders differ."""
    if order.ndim == 1:
        return ordered(x, order)
    each = jnp.repeat(x, chosen.size // len(x), axis=0)
    return jnp.take_along_axis(each, order[chosen.reshape(-1)], axis=1, mode="clip")


def _check(
    weight: Array | np.ndarray | FewBits,
    x: Array | np.ndarray,
    chosen: Array | np.ndarray,
    bias: Array | np.ndarray | None,
    weights: Array | np.ndarray | None,
    group_axis: int,
    epilogue: Epilogue,
) -> None:
    """Raises `ValueError` for arguments that do not fit each other."""
    check_matrices(weight, x, group_axis)
    check_ids("chosen", chosen, (None, None))
    if x.shape[0] not in (chosen.shape[0], chosen.size):
        raise ValueError(
            f"x must have a row for each row of chosen or each choice, got {x.shape[0]} rows for {list(chosen.shape)}"
        )
    groups, out = weight.shape[group_axis], weight.shape[1 - group_axis]
    if bias is not None:
        check_shape("bias", bias, (groups, out))
        if bias.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"bias must be float32, bfloat16 or float16, got {bias.dtype}")
    activation = epilogue.activation
    if weights is not None:
        check_shape("weights", weights, chosen.shape)
        if weights.dtype != jnp.float32 or epilogue.gated or activation is not None:
            raise ValueError(
                f"weights must be float32 and take no activation, got {weights.dtype}, gated={epilogue.gated} and "
                f"{activation!r}"
            )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if epilogue.clamp is not None and (activation is not None or not epilogue.gated):
        raise ValueError(
            f"clamp takes gated products and no activation, got gated={epilogue.gated} and {activation!r}"
        )
    if epilogue.gated and epilogue.clamp is None and activation is None:
        raise ValueError("gated products need an activation or a clamp")
    if epilogue.gated and out % 2:
        raise ValueError(f"gated matrices must have two rows for each column, got {out} rows")
    if isinstance(chosen, Tracer) or not chosen.size:
        return
    if (largest := int(np.max(np.asarray(chosen)))) >= groups:
        raise ValueError(f"there are {groups} groups, but a row chooses group {largest}")
