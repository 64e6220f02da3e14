"""Geometry (sizes, limits) and schedule (consumers, stages) of the `ssd_scan` kernel; host code."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments.ssd import Sizes
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import NUM_MULTIPROCESSORS

SIDE = 64
"""Tokens of a piece, and side of each square that a warpgroup multiplies."""

# Bytes of shared memory of a block, without what Mosaic uses itself.
_MOST_BYTES = 232448 - 4096


@dataclass(frozen=True)
class Schedule:
    """The division of a layer among blocks.

    Attributes:
        consumers: consumer warpgroups per block, each for one unit (64 components of one head); it divides the number
            of a group's units.
        stages: pieces in flight.
        exact: whether tokens' weights are multiplied in two parts, the rounded weight and its rounding error.
    """

    consumers: int
    stages: int
    exact: bool = True

    @classmethod
    def by_rule(cls, geometry: "Geometry", rows: int) -> "Schedule":
        """Returns the schedule that was fastest on an H200 (NOTES.md).

        Two consumers share B and C if registers suffice for both and there are enough blocks for all SMs.
        """
        alone = geometry.blocks > 2 or rows * geometry.units < 2 * NUM_MULTIPROCESSORS
        able = [
            cls(consumers, stages)
            for consumers in ((1,) if alone else (2, 1))
            for stages in (3, 2)
            if geometry.units_per_group % consumers == 0
        ]
        return next(each for each in able if geometry.shared_bytes(each) <= _MOST_BYTES)


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for; a unit is 64 components of one head.

    Attributes:
        sizes: sizes of the layer.
        dtype: dtype of xbc and outputs.
        state_dtype: dtype of the pool of states.
    """

    sizes: Sizes
    dtype: DTypeLike
    state_dtype: DTypeLike

    @classmethod
    def of(cls, states: ArrayOrStruct, xbc: ArrayOrStruct) -> "Geometry":
        """Returns the geometry of these arrays."""
        return cls(Sizes.of(states, xbc), jnp.dtype(xbc.dtype), jnp.dtype(states.dtype))

    @property
    def units_per_head(self) -> int:
        """Number of units of a head."""
        return self.sizes.head_dim // SIDE

    @property
    def units(self) -> int:
        """Number of units of all heads."""
        return self.sizes.heads * self.units_per_head

    @property
    def units_per_group(self) -> int:
        """Number of units that use the same B and C."""
        return self.units // self.sizes.groups

    @property
    def blocks(self) -> int:
        """Number of squares of 64 columns of B, C and the state."""
        return self.sizes.d_state // SIDE

    def packs(self, consumers: int) -> int:
        """Returns the number of blocks per row; the units of a block belong to one group."""
        assert self.units_per_group % consumers == 0, (self.units_per_group, consumers)
        return self.units // consumers

    def refusal(self, chunk_size: int) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if str(self.dtype) not in ("bfloat16", "float16"):
            return f"xbc must be bfloat16 or float16, got {self.dtype}"
        if str(self.state_dtype) not in ("float32", "bfloat16", "float16"):
            return f"states must be float32, bfloat16 or float16, got {self.state_dtype}"
        if self.sizes.head_dim % SIDE or self.sizes.d_state % SIDE:
            return (
                f"head_dim and d_state must be multiples of {SIDE}, "
                f"got {self.sizes.head_dim} and {self.sizes.d_state}"
            )
        if self.sizes.d_state > 256:
            return f"d_state must be at most 256, got {self.sizes.d_state}"
        if chunk_size % SIDE:
            return f"chunk_size must be a multiple of {SIDE}, got {chunk_size}"
        return None

    def shared_bytes(self, schedule: Schedule) -> int:
        """Returns the shared memory of one block in bytes."""
        square = SIDE * SIDE * 2
        stage = (2 * self.blocks + schedule.consumers) * square + schedule.consumers * 2 * SIDE * 4
        # Weights in one or two parts, and outputs; factors of each token.
        own = (2 + schedule.exact) * square + 2 * SIDE * 4
        return schedule.stages * stage + schedule.consumers * own
