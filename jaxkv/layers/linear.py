"""A projection by a weight in Hugging Face's [out, in] orientation. Nothing is transposed or converted for it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import skinny_matmul
from pallas_kernels.families import member
from pallas_kernels.skinny_matmul.mosaic_geometry import MOST_ROWS
from pallas_kernels.skinny_matmul.xla import Weighed


class Normed(NamedTuple):
    """Hidden states behind an RMSNorm whose division is left to the projection that reads them.

    Attributes:
        rows: what the projection before said of them.
        eps: of the norm.
    """

    rows: Weighed
    eps: float


class Joining(NamedTuple):
    """What a block's last projection adds to, and what comes next.

    Attributes:
        hidden: the residual stream.
        next_norms: weights of norms; `None` if the norm that comes next is not the projection's affair.
        row: which of them the sum goes into.
    """

    hidden: Float[Array, "tokens hidden_size"]
    next_norms: Float[Array, "norms hidden_size"] | None
    row: int = 0


def linear(
    weight: Float[Array, "out in"],
    x: Float[Array, "tokens in"],
    bias: Float[Array, " out"] | None = None,
    *,
    implementation: str | None = "xla",
) -> Float[Array, "tokens out"]:
    """Computes `x @ weight.T + bias` in the weight's dtype, accumulated in float32.

    Another family of implementations than "xla" lets few tokens run on our kernel.
    """
    if implementation != "xla":
        return matmul(weight, x, bias=bias, implementation=implementation)
    y = project(weight, x)
    return y if bias is None else y + bias[None]


def joins_norms(implementation: str | None, tokens: int) -> bool:
    """Tells whether norms and the residual stream cost less as parts of projections than as passes of their own."""
    return implementation == "mosaic_gpu" and tokens <= MOST_ROWS


def matmul(
    weight: Float[Array, "weights in"],
    x: Float[Array, "tokens in"] | Normed,
    *,
    bias: Float[Array, " weights"] | None = None,
    joining: Joining | None = None,
    activation: str | None = None,
    gated: bool = False,
    gate_multiplier: float = 1.0,
    result: jnp.dtype | type | None = None,
    implementation: str | None = None,
) -> Any:  # noqa: ANN401 - an array, or a `Weighed` for what joins a norm
    """Projects with all that comes before and after it, as `skinny_matmul` does."""
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
    weight: Float[Array, "out in"],
    x: Float[Array, "tokens in"],
    *,
    result: jnp.dtype | type | None = None,
) -> Float[Array, "tokens out"]:
    """Contracts the last axes, into the weight's dtype or `result`.

    A float32 weight asks for float32 products: on NVIDIA GPUs the default would round its inputs to TF32.
    """
    exact = weight.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=result,
    )


def scaled(x: Float[Array, "tokens width"], factor: float) -> Float[Array, "tokens width"]:
    """Multiplies by a constant of the family; most have none, and then nothing is computed."""
    return x if factor == 1.0 else x * factor
