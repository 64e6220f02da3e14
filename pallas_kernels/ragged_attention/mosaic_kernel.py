"""Static parameters of one build of the `ragged_attention` kernel."""

from dataclasses import dataclass

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.ragged_attention.mosaic_schedule import Geometry, Schedule


@dataclass(frozen=True)
class Kernel:
    """All static parameters of one build; mosaic_launch.py builds the kernel from them.

    Attributes:
        geometry: sizes of heads and pages.
        options: scale, window and soft cap.
        schedule: tile sizes, stages and blocks.
        num_tiles: static upper bound of the number of query tiles.
        has_lse: whether the log-sum-exp is an output.
        has_sinks: whether sinks are an input.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
    """

    geometry: Geometry
    options: ScoreOptions
    schedule: Schedule
    num_tiles: int
    has_lse: bool
    has_sinks: bool
    interpret: bool

    @property
    def pieces(self) -> int:
        """Upper bound of the pieces of work (mosaic_piece.py): query tiles x packs of heads."""
        return self.num_tiles * self.geometry.units

    @property
    def has_producer(self) -> bool:
        """Whether a third warpgroup fetches tiles; otherwise the second consumer does."""
        return honours_register_requests()

    @property
    def edges(self) -> int:
        """Barriers for tiles of values with hidden rows: one per stage, but a producer has one such tile at a time."""
        return 1 if self.has_producer else self.schedule.stages

    @property
    def blocks(self) -> int:
        """Blocks of the launch; one per piece with sinks, as no registers are left for a loop over pieces.

        Likewise without a producer, which alone would fetch the next piece ahead.
        """
        one_each = self.has_sinks or not self.has_producer
        return self.pieces if one_each else min(self.pieces, self.schedule.blocks)
