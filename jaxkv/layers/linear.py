"""Projections by weights in Hugging Face's [out, in] orientation, without transposing or converting them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv.layers.adapted import Adapted
from pallas_kernels import skinny_matmul
from pallas_kernels.families import member
from pallas_kernels.fixed_order import by_row_tiles, is_fixed, sum_of_last
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.skinny_matmul.api import MOST_ROWS, Weighed, weigh


class Normed(NamedTuple):
    """Hidden states after an RMSNorm whose division the next projection computes.

    Attributes:
        rows: output of the previous projection: the sum times the norm's weight, and the sums of squares.
        eps: epsilon of the norm.
    """

    rows: Weighed
    eps: float

    @property
    def divided(self) -> Float[Array, "tokens width"]:
        """The hidden states after the whole norm, for a product that does not compute the division itself."""
        wide = self.rows.weighed.astype(jnp.float32)
        mean_square = sum_of_last(self.rows.squares.T) / wide.shape[1]
        return (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(self.rows.weighed.dtype)


class Joining(NamedTuple):
    """The residual stream to which a block's last projection adds its output, and the norm after that.

    Attributes:
        hidden: the residual stream.
        next_norms: weights of norms; `None` if the projection does not multiply by the next norm's weight.
        row: row of `next_norms` that is the next norm's weight.
    """

    hidden: Float[Array, "tokens hidden_size"]
    next_norms: Float[Array, "norms hidden_size"] | None
    row: int = 0


_PART = 128
"""Columns whose squares are added up together where XLA weighs rows for a norm."""


def weigh_stream(hidden: Float[Array, "tokens hidden_size"], joining: Joining) -> Weighed:
    """Returns the residual stream after an addition as a projection returns it whose `joining` has the next norm."""
    assert joining.next_norms is not None, "no norm follows"
    width = hidden.shape[1]
    parts = width // _PART if width % _PART == 0 else 1
    return weigh(hidden, joining.next_norms[joining.row], parts=parts)


Weight = Float[Array, "out in"] | FewBits | Adapted
"""A weight of a projection: plain, in 8 or 4 bits, or either of them with adapters."""


def linear(
    weight: Weight,
    x: Float[Array, "tokens in"],
    bias: Float[Array, " out"] | None = None,
    *,
    implementation: str | None,
) -> Float[Array, "tokens out"]:
    """Computes `x @ weight.T + bias` in the dtype of `x`, accumulated in float32; adapters' products are added.

    XLA multiplies plain weights, and `skinny_matmul` those in few bits.

    Args:
        weight: weight of the projection.
        x: the input, in the weight's dtype if that is plain.
        bias: bias of the projection.
        implementation: family of implementations for a weight in few bits; `None` for the best.
    """
    if in_few_bits(weight):
        return matmul(weight, x, bias=bias, implementation=implementation)
    y = project(weight, x)
    return y if bias is None else y + bias[None]


def in_few_bits(weight: Weight) -> bool:
    """Returns whether a weight, without its adapters, is in 8 or 4 bits."""
    return isinstance(weight.weight if isinstance(weight, Adapted) else weight, FewBits)


def joins_norms(implementation: str | None, tokens: int) -> bool:
    """Whether it is faster to fuse norms and the residual addition into projections than to compute them separately.

    Under the fixed order of sums the number of tokens does not matter, since the two forms differ in the last bits.
    """
    return implementation == "mosaic_gpu" and (tokens <= MOST_ROWS or is_fixed())


def matmul(
    weight: Weight,
    x: Float[Array, "tokens in"] | Normed,
    *,
    bias: Float[Array, " weights"] | None = None,
    joining: Joining | None = None,
    activation: str | None = None,
    gated: bool = False,
    gate_multiplier: float = 1.0,
    result: DTypeLike | None = None,
    implementation: str | None = None,
) -> Any:  # noqa: ANN401 - an array, or a `Weighed` if a norm follows
    """Projects with the fused operations of `skinny_matmul`: norm before it, activation and residual after it.

    Args:
        weight: weight of the projection; gate and up rows if `gated`. An `Adapted` allows neither `gated` nor an
            activation, because the adapters' products come before these.
        x: the input, `Normed` if the division of a norm is to be fused.
        bias: bias of the projection.
        joining: residual stream to add to, and the next norm.
        activation: name of an activation.
        gated: whether `weight` has gate rows first and then up rows.
        gate_multiplier: factor of the gate before its activation.
        result: dtype of the result; `None` for the weight's, or that of `x` for few bits.
        implementation: family of implementations; `None` for the best.

    Returns:
        The output, its sum with the residual stream, or a `Weighed` if `joining` has the next norm's weights.
    """
    if isinstance(weight, Adapted):
        assert activation is None, "an adapter's product is added before the activation"
        assert not gated, "an adapter's product is added before the gate"
        run = partial(matmul, weight.weight, x, bias=bias, result=result)
        rows = x.divided if isinstance(x, Normed) else x
        if joining is None:
            return weight.added_to(run(implementation=implementation), rows)
        # The projection's result is weighed for the next norm in the same kernel, so the adapters' come before it.
        joining = joining._replace(hidden=weight.added_to(joining.hidden, rows))
        return run(joining=joining, implementation=implementation)
    norm, added = {}, {}
    if isinstance(x, Normed):
        norm = {"squares": x.rows.squares, "norm_eps": x.eps}
        x = x.rows.weighed
    if joining is not None:
        added = {
            "residual": joining.hidden,
            "next_norm": joining.next_norms,
            "norm_row": joining.row,
        }
    return skinny_matmul(
        weight,
        x,
        bias=bias,
        activation=activation,
        gated=gated,
        gate_multiplier=gate_multiplier,
        result=result,
        implementation=member(implementation, "skinny_matmul"),
        **norm,
        **added,
    )


def project(
    weight: Weight,
    x: Float[Array, "tokens in"],
    *,
    result: DTypeLike | None = None,
) -> Float[Array, "tokens out"]:
    """Computes `x @ weight.T` of a plain weight in XLA, in the dtype `result`; `None` for the weight's dtype.

    Products of float32 weights are exact float32: on NVIDIA GPUs the default would round the inputs to TF32.
    """
    if isinstance(weight, Adapted):
        return weight.added_to(project(weight.weight, x, result=result), x)
    assert not isinstance(weight, FewBits), "`linear` and `matmul` alone take few bits"
    exact = weight.dtype == jnp.float32

    def multiply(rows: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        return jax.lax.dot_general(
            rows,
            weight,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if exact else None,
            preferred_element_type=result,
        )

    return by_row_tiles(multiply, x)


def scaled(x: Float[Array, "tokens width"], factor: float) -> Float[Array, "tokens width"]:
    """Returns `x * factor`, and `x` itself if the factor is 1."""
    return x if factor == 1.0 else x * factor
