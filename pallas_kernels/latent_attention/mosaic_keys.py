"""Static parameters of one build of the kernel with keys on the left operand, including its ring of pieces."""

from dataclasses import dataclass

from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, TILE, Geometry, Schedule

# Bytes of a block's shared memory for pieces, queries and weights.
_MOST_BYTES = 232448 - 4096
# Most pieces in the ring: Mosaic allows 32 mbarriers in one array, and the producer needs some of its own.
_MOST_PLACES = 24


@dataclass(frozen=True)
class KeysKernel:
    """The kernel for one geometry, one scale and one schedule.

    Attributes:
        geometry: sizes of heads, latents and pages.
        scale: factor of the scores.
        schedule: clusters and parts.
        pieces: number of pieces of work, which is the number of rows.
        has_lse: whether the log-sum-exp is an output.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
    """

    geometry: Geometry
    scale: float
    schedule: Schedule
    pieces: int
    has_lse: bool
    interpret: bool

    @property
    def has_producer(self) -> bool:
        """Whether a warpgroup of its own fetches tiles: one consumer leaves room for it."""
        return True

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of columns of each piece of a tile."""
        columns = 3 * COLUMN_TILE if self.geometry.width % (3 * COLUMN_TILE) == 0 else COLUMN_TILE
        return (columns,) * (self.geometry.width // columns)

    @property
    def ring(self) -> int:
        """Number of pieces in the ring buffer of a block."""
        g = self.geometry
        piece, others = TILE * self.widths[0] * 2, g.heads * (g.width + TILE) * 2
        return min((_MOST_BYTES - others) // piece, _MOST_PLACES)
