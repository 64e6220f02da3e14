"""What becomes of the sums of `gathered_matmul`: the activation of an expert's first product, and the dtype."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.activations import activate, clamped_gate, gate


@dataclass(frozen=True)
class Epilogue:
    """What `api.gathered_matmul` does with its sums, bias included.

    Attributes:
        activation: name of an activation, or `None`.
        gated: whether the columns are gates, then as many others.
        clamp: limit of `clamped_gate`, which takes the activation's place; `None` without.
        result: dtype of the result.
    """

    activation: str | None = None
    gated: bool = False
    clamp: float | None = None
    result: DTypeLike = jnp.float32

    def columns(self, out: int) -> int:
        """Returns the columns of the result of a weight with `out` rows."""
        return out // 2 if self.gated else out

    def applied(self, sums: Float32[Array, "*rows out"]) -> Float[Array, "*rows columns"]:
        """Returns the result of float32 sums, bias included."""
        if self.clamp is not None:
            sums = clamped_gate(sums, limit=self.clamp)
        elif self.activation is not None:
            end = gate if self.gated else activate
            sums = end(sums, activation=self.activation)
        return sums.astype(self.result)


SUMS = Epilogue()
"""The float32 sums as they are."""
