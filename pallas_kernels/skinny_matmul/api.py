"""The door to `skinny_matmul`: few rows times a large weight, and what follows from it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.skinny_matmul import mosaic_gpu, xla
from pallas_kernels.skinny_matmul.activations import ACTIVATIONS
from pallas_kernels.skinny_matmul.xla import Weighed


def skinny_matmul(
    weight: Shaped[Array | np.ndarray, "weights inner"],
    x: Shaped[Array | np.ndarray, "rows inner"],
    *,
    scales: Shaped[Array | np.ndarray, " weights"] | None = None,
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
    """Computes `activation(x @ weight.T * scales + bias) + residual`, summed in float32.

    A decode step is as fast as it reads its weights. The kernel takes up to 64 rows and reads each weight once; more
    rows, or sizes that it does not take, are XLA's. What a row becomes depends on no other row, to the bit.

    An RMSNorm between two products needs no pass of its own: the first is given the norm's weights (`next_norm`) and
    returns `Weighed`; the second one gets its `weighed` as x, and divides its sums by the root mean square that it
    finds from `squares`.

    Args:
        weight: one row for each column of the result, as Hugging Face has it; with `gated` those of all gates, then
            as many more. Of x's dtype, or 8 bits with `scales`.
        x: rows of any floating dtype.
        scales: for a weight of float8_e4m3fn or int8, what each of its rows is multiplied by.
        bias: added to each row's sums.
        residual: added to the result, after everything else.
        squares: of a `Weighed` whose `weighed` is x: float32 sums of the squares of each row before it was weighed.
        norm_eps: added to the mean square; only with `squares`.
        next_norm: weights of norms, of which the result goes into one. They come together, since XLA would copy one.
        norm_row: which one.
        activation: "silu", "gelu", "gelu_tanh" or "relu2", in float32; `None` for none.
        gated: the result is `activation(gates) * rest`, half as wide as the weight has rows.
        gate_multiplier: of gates, or of all sums without gates, before the activation.
        result: dtype of the result; x's if `None`.
        implementation: "mosaic_gpu", "xla", or `None` for the better one that can run.

    Returns:
        The rows. With 16 bits, XLA rounds sums to the result's dtype before bias, activation and residual; the kernel
        rounds once, at the end. With `next_norm` a `Weighed`.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the implementation asked for cannot run; the message says why.
    """
    extras = {"bias": bias, "residual": residual, "squares": squares, "next_norm": next_norm}
    _check(weight, x, extras, scales, activation, gated=gated)
    arrays = tuple(map(jnp.asarray, (weight, x)))
    # To JAX `None` is a tree without leaves.
    optional = jax.tree.map(jnp.asarray, extras | {"scales": scales})
    options = {
        "activation": activation,
        "gated": gated,
        "gate_multiplier": gate_multiplier,
        "norm_eps": norm_eps,
        "norm_row": norm_row,
        "result": result,
    }
    able = {"activation": activation, "gated": gated}
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(*arrays, **able), "xla": lambda: None}
    if mosaic_gpu.refusal(*arrays, **able) is not None:
        # Nothing is passed over: for such sizes and dtypes a library's product is the form to take.
        reasons = dict(reversed(reasons.items()))
    chosen = choose("skinny_matmul", reasons, implementation)
    if chosen == "mosaic_gpu" and x.shape[0]:
        return mosaic_gpu.skinny_matmul(*arrays, **optional, **options)
    return xla.skinny_matmul(*arrays, **optional, **options)


def _check(
    weight: Array | np.ndarray,
    x: Array | np.ndarray,
    extras: Mapping[str, Array | np.ndarray | None],
    scales: Array | np.ndarray | None,
    activation: str | None,
    *,
    gated: bool,
) -> None:
    """Refuses what does not fit."""
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (None, x.shape[1]))
    if gated and weight.shape[0] % 2:
        raise ValueError(
            f"a gated weight holds two rows for each column, got {weight.shape[0]} rows"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    out = weight.shape[0] // (2 if gated else 1)
    wanted = {
        "scales": weight.shape[:1],
        "bias": weight.shape[:1],
        "residual": (x.shape[0], out),
        "squares": (None, x.shape[0]),
        "next_norm": (None, out),
    }
    for name, array in {**extras, "scales": scales}.items():
        if array is not None:
            check_shape(name, array, wanted[name])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must have a floating dtype, got {x.dtype}")
    packed = jnp.dtype(weight.dtype).name in LARGEST
    if packed != (scales is not None):
        raise ValueError(
            f"a weight of {' or '.join(LARGEST)} comes with scales and no other does, got {weight.dtype} "
            f"with{'out' if scales is None else ''} scales"
        )
    if not packed and weight.dtype != x.dtype:
        raise ValueError(
            f"weight and x must share one dtype, got {weight.dtype} and {x.dtype}; cast x to the weight's"
        )
