"""A bracket around the sought bound, and interpolation for the next step of the search."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.bisection import midpoint


class Bounds(NamedTuple):
    """The sought bound lies in [low, high); both are integers that order as floats do.

    Attributes:
        low: a bound that enough values reach.
        high: a bound that too few values reach.
        above: number of values >= `low`.
        over: number of values >= `high`.
    """

    low: Array
    high: Array
    above: Array
    over: Array

    def narrowed(self, middle: Array, count: Array, wanted: Array) -> "Bounds":
        """Returns the part of the bracket that remains, given that `count` values are >= `middle`."""
        holds = count.astype(jnp.float32) >= wanted
        return Bounds(
            jnp.where(holds, middle, self.low),
            jnp.where(holds, self.high, middle),
            jnp.where(holds, count, self.above),
            jnp.where(holds, self.over, count),
        )

    def interpolated(self, wanted: Array) -> Array:
        """Returns the bound by linear interpolation between both ends (regula falsi)."""
        distance = self.high - self.low
        share = (self.above.astype(jnp.float32) - wanted + 0.5) / jnp.maximum(
            self.above - self.over, 1
        ).astype(jnp.float32)
        step = (jnp.maximum(distance, 1).astype(jnp.float32) * share).astype(jnp.int32)
        interpolated = jnp.minimum(jnp.maximum(self.low + step, self.low + 1), self.high - 1)
        # If `high - low` overflows int32, take the midpoint.
        return jnp.where(distance > 1, interpolated, midpoint(self.low, self.high))
