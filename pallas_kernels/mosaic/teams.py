"""The warpgroups of a block that has a row of numbers to itself, and what they have in shared memory. Knows no op."""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic.warps import WARPS

PIECE = 512
"""Numbers that a warpgroup loads at once: four for each thread."""


@dataclass(frozen=True)
class Team:
    """The warpgroups of a block.

    Attributes:
        warpgroups: how many; 2 or 4.
        listed: numbers that the block can list in shared memory, in equal parts for its warps.
    """

    warpgroups: int
    listed: int

    @property
    def warps(self) -> int:
        """Warps of the block."""
        return self.warpgroups * WARPS

    @property
    def room(self) -> int:
        """Numbers that the list holds for each warp."""
        return self.listed // self.warps

    def scratch(self) -> dict[str, Any]:
        """Returns what a block needs in shared memory, by the names that a `Bisection` knows it by."""
        return {
            "found": plgpu.SMEM((self.listed,), jnp.float32),
            "ints": plgpu.SMEM((self.warps, 2), jnp.int32),
            "floats": plgpu.SMEM((self.warps, 2), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=self.warpgroups),
        }


LARGE = Team(4, 8192)
"""For long lists."""

MEDIUM = Team(4, 4096)
"""For few rows: each is done as soon as can be."""

SMALL = Team(2, 4096)
"""For many rows: blocks share a multiprocessor, and some work while others wait."""
