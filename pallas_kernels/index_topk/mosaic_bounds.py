"""Two bounds between which the one that is sought lies, and where to ask next. Knows no kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.bisection import midpoint


class Bounds(NamedTuple):
    """Where the bound lies, as integers in the order of floats.

    Attributes:
        low: enough numbers are no less than this one.
        high: too few are no less than this one.
        above: how many are no less than `low`.
        over: how many are no less than `high`.
    """

    low: Array
    high: Array
    above: Array
    over: Array

    def narrowed(self, middle: Array, count: Array, wanted: Array) -> "Bounds":
        """What is left when `count` numbers are no less than the middle."""
        holds = count.astype(jnp.float32) >= wanted
        return Bounds(
            jnp.where(holds, middle, self.low),
            jnp.where(holds, self.high, middle),
            jnp.where(holds, count, self.above),
            jnp.where(holds, self.over, count),
        )

    def likely(self, wanted: Array) -> Array:
        """Where the bound lies if numbers are spread evenly between both ends."""
        distance = self.high - self.low
        share = (self.above.astype(jnp.float32) - wanted + 0.5) / jnp.maximum(
            self.above - self.over, 1
        ).astype(jnp.float32)
        step = (jnp.maximum(distance, 1).astype(jnp.float32) * share).astype(jnp.int32)
        likely = jnp.minimum(jnp.maximum(self.low + step, self.low + 1), self.high - 1)
        # The distance of far ends overflows.
        return jnp.where(distance > 1, likely, midpoint(self.low, self.high))
