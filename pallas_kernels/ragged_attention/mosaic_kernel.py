"""What one build of the kernel of `ragged_attention` is made for: its sizes, its options, its schedule."""

from dataclasses import dataclass

from pallas_kernels.mosaic.scores import Options
from pallas_kernels.ragged_attention.mosaic_schedule import Geometry, Schedule


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one set of options and one schedule."""

    geometry: Geometry
    options: Options
    schedule: Schedule
    num_tiles: int
    has_lse: bool
    has_sinks: bool
    interpret: bool

    @property
    def pieces(self) -> int:
        """Pieces of work, at most."""
        return self.num_tiles * self.geometry.units

    @property
    def blocks(self) -> int:
        """Blocks of the launch; sinks leave no registers for several pieces in one."""
        return self.pieces if self.has_sinks else min(self.pieces, self.schedule.blocks)
