"""The arrays and options of `skinny_matmul`, as its `api.py` passes them to the implementations."""

from dataclasses import dataclass
from typing import NamedTuple

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats.few_bits import FewBits


class MatmulArrays(NamedTuple):
    """The arrays of a call, described in `api.py`; absent ones are `None`. A weight's `order` was applied to x."""

    weight: Shaped[Array, "weights inner"] | FewBits
    x: Float[Array, "rows inner"]
    bias: Float[Array, " weights"] | None = None
    residual: Float[Array, "rows out"] | None = None
    squares: Float[Array, "parts rows"] | None = None
    next_norm: Float[Array, "norms out"] | None = None


@dataclass(frozen=True)
class MatmulOptions:
    """The options of a call, as static values.

    Attributes:
        activation: name of the activation; `None` for none.
        gated: whether the result is `activation(gates) * others`.
        gate_multiplier: factor of the gates, or without gates of all sums, before the activation.
        norm_eps: epsilon that is added to the mean square; used only with `squares`.
        norm_row: row of `next_norm`.
        result: dtype of the result; x's if `None`.
    """

    activation: str | None = None
    gated: bool = False
    gate_multiplier: float = 1.0
    norm_eps: float = 0.0
    norm_row: int = 0
    result: DTypeLike | None = None
