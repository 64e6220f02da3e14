"""Block configurations of the selection kernels (one block per row): warpgroups and capacity of the list."""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic.warps import WARPS

PIECE = 512
"""Elements that a warpgroup loads at once: four per thread."""


@dataclass(frozen=True)
class Team:
    """The warpgroups of a block.

    Attributes:
        warpgroups: number of warpgroups, 2 or 4.
        listed: capacity of the block's list in shared memory, in float32 elements, split equally among its warps.
    """

    warpgroups: int
    listed: int

    @property
    def warps(self) -> int:
        """Warps of the block."""
        return self.warpgroups * WARPS

    @property
    def room(self) -> int:
        """Capacity of each warp's part of the list."""
        return self.listed // self.warps

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory that `Bisection` uses, by the names in `Bisection.refs`."""
        return {
            "found": plgpu.SMEM((self.listed,), jnp.float32),
            "ints": plgpu.SMEM((self.warps, 2), jnp.int32),
            "floats": plgpu.SMEM((self.warps, 2), jnp.float32),
            "all_arrived": plgpu.Barrier(num_arrivals=self.warpgroups),
        }


LARGE = Team(4, 8192)
"""For long lists."""

MEDIUM = Team(4, 4096)
"""For few rows: the lowest latency per row."""

SMALL = Team(2, 4096)
"""For many rows: several blocks are resident on one SM and hide each other's latency."""
