"""Public entry point of `skinny_matmul`: few rows times a large weight, fused with the operations around it."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.activations import ACTIVATIONS
from pallas_kernels.arguments.checks import check_few_bits, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.formats.few_bits_product import ordered, widens_whole
from pallas_kernels.skinny_matmul import mosaic_gpu, xla
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.skinny_matmul.mosaic_geometry import MOST_ROWS
from pallas_kernels.skinny_matmul.weighed import Weighed, weigh

__all__ = ["MOST_ROWS", "Weighed", "skinny_matmul", "weigh"]

# Columns of a turn of rows in 8 bits.
_ROUNDED_COLUMNS = 128


def skinny_matmul(
    weight: Shaped[Array | np.ndarray, "weights inner"] | FewBits,
    x: Shaped[Array | np.ndarray, "rows inner"],
    *,
    bias: Shaped[Array | np.ndarray, " weights"] | None = None,
    residual: Shaped[Array | np.ndarray, "rows out"] | None = None,
    squares: Shaped[Array | np.ndarray, "parts rows"] | None = None,
    norm_eps: float = 0.0,
    next_norm: Shaped[Array | np.ndarray, "norms out"] | None = None,
    norm_row: int = 0,
    activation: str | None = None,
    gated: bool = False,
    gate_multiplier: float = 1.0,
    result: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"] | Weighed:
    """Computes `activation(x @ weight.T + bias) + residual`, accumulated in float32.

    A decode step is bound by reading its weights. The kernel supports up to 64 rows, for which it reads each weight
    once, and any number of a weight in 8 or 4 bits or under the fixed order of sums (`pallas_kernels.fixed_order`).
    Other calls run in XLA. A row's bits do not depend on the other rows.

    An RMSNorm between two products needs no pass over the rows. Give the first product the norm's weights
    (`next_norm`); it returns a `Weighed`. Give the second product its `weighed` as x and its `squares`; it divides its
    sums by the root mean square.

    Args:
        weight: [out, inner], one row for each column of the result, as in Hugging Face checkpoints. With `gated` the
            rows of all gates, then as many others. In x's dtype, or in 8 or 4 bits as `FewBits`, which is read as it
            lies: the kernel widens it in registers and "xla" a few rows at a time. With several scales per row "xla",
            and the kernel for more than 64 rows, round the widened numbers to x's dtype; all else is exact. "xla" is
            preferred for such a weight and many rows of x, at least 512 for 8 bits and 4096 for 4 bits, and widens it
            whole, up to 512 MiB. The kernel takes the codes of NaN in e4m3 for 480. If it has `rounds_rows`, more than
            64 rows of x in 16 bits are rounded to e4m3 too, if they have a multiple of 128 columns, and not under the
            fixed order.
        x: rows of any floating dtype. If the weight has an `order`, their columns are permuted by it.
        bias: one value per row of the weight, added before the activation.
        residual: added last.
        squares: `squares` of the `Weighed` whose `weighed` is x: float32 sums of the squares of each row before the
            norm's weights.
        norm_eps: epsilon that is added to the mean square; used only with `squares`.
        next_norm: [norms, out], weights of norms of any floating dtype, one of which is applied to the result. They are
            given together, because XLA would copy a single row.
        norm_row: row of `next_norm`.
        activation: "silu", "gelu", "gelu_tanh" or "relu2", computed in float32; `None` for none.
        gated: whether the result is `activation(gates) * others`, with half as many columns as the weight has rows.
        gate_multiplier: factor of the gates, or without gates of all sums, before the activation.
        result: dtype of the result; x's if `None`.
        implementation: "mosaic_gpu", "xla", or `None` for the preferred one that can run.

    Returns:
        The rows, or with `next_norm` a `Weighed`. In 16-bit dtypes XLA rounds the sums to the result's dtype before
        bias, activation and residual; the kernel rounds once, at the end.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    options = MatmulOptions(activation, gated, gate_multiplier, norm_eps, norm_row, result)
    given = {
        "bias": bias,
        "residual": residual,
        "squares": squares,
        "next_norm": next_norm,
    }
    _check(weight, x, given, options)
    # `None` is an empty pytree, so absent arguments stay `None`.
    arrays = MatmulArrays(**jax.tree.map(jnp.asarray, given | {"weight": weight, "x": x}))
    if isinstance(arrays.weight, FewBits):
        rounds = arrays.weight.rounds_rows and _rounds(arrays.x)
        weight = replace(arrays.weight, order=None, rounds_rows=rounds)
        arrays = arrays._replace(weight=weight, x=ordered(arrays.x, arrays.weight.order))
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(arrays, options), "xla": lambda: None}
    if mosaic_gpu.refusal(arrays, options) is not None or _is_for_library(arrays):
        # For these sizes and dtypes XLA is preferred, so its choice must not count as a fallback.
        reasons = dict(reversed(reasons.items()))
    chosen = choose("skinny_matmul", reasons, implementation)
    if chosen == "mosaic_gpu" and x.shape[0]:
        return mosaic_gpu.skinny_matmul(arrays, options)
    return xla.skinny_matmul(arrays, options)


def _is_for_library(arrays: MatmulArrays) -> bool:
    """Returns whether a weight in few bits is widened whole for a library's product, faster than the kernel."""
    return isinstance(arrays.weight, FewBits) and widens_whole(arrays.weight, arrays.x)


def _rounds(x: Array) -> bool:
    """Returns whether rows of x are rounded to 8 bits where a weight asks for it (`FewBits.rounds_rows`).

    Few rows are not rounded: reading the weight takes longer than multiplying. Nor are rows under the fixed order of
    sums, whose products are the same in calls of any size, rows of float32, and rows that no whole number of turns of
    the kernel covers.
    """
    rows, inner = x.shape
    whole = inner % _ROUNDED_COLUMNS == 0
    return rows > MOST_ROWS and x.dtype.itemsize == 2 and whole and not is_fixed()


def _check(
    weight: Array | np.ndarray | FewBits,
    x: Array | np.ndarray,
    optional: Mapping[str, Array | np.ndarray | None],
    options: MatmulOptions,
) -> None:
    """Raises `ValueError` for arguments that do not fit each other."""
    activation = options.activation
    check_shape("x", x, (None, None))
    if isinstance(weight, FewBits):
        check_few_bits("weight", weight)
        if weight.order is not None:
            check_shape("weight.order", weight.order, weight.shape[-1:])
    check_shape("weight", weight, (None, x.shape[1]))
    if options.gated and weight.shape[0] % 2:
        raise ValueError(
            f"a gated weight must have two rows for each column, got {weight.shape[0]} rows"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    out = weight.shape[0] // (2 if options.gated else 1)
    wanted = {
        "bias": weight.shape[:1],
        "residual": (x.shape[0], out),
        "squares": (None, x.shape[0]),
        "next_norm": (None, out),
    }
    for name, array in optional.items():
        if array is not None:
            check_shape(name, array, wanted[name])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must have a floating dtype, got {x.dtype}")
    if not isinstance(weight, FewBits) and weight.dtype != x.dtype:
        raise ValueError(
            f"weight and x must share one dtype, got {weight.dtype} and {x.dtype}; cast x to the weight's"
        )
