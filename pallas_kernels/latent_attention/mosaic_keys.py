"""What one build of the kernel with keys on the left is made for: its sizes, its schedule, its ring of pieces."""

from dataclasses import dataclass

from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, TILE, Geometry, Schedule

# Shared memory of a block that is left to pieces, queries and weights.
_MOST_BYTES = 232448 - 4096
# A warpgroup can remember the phases of 32 barriers.
_MOST_PLACES = 24


@dataclass(frozen=True)
class KeysKernel:
    """The kernel for one geometry, one scale and one schedule."""

    geometry: Geometry
    scale: float
    schedule: Schedule
    pieces: int
    has_lse: bool
    interpret: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each piece of a tile."""
        columns = 3 * COLUMN_TILE if self.geometry.width % (3 * COLUMN_TILE) == 0 else COLUMN_TILE
        return (columns,) * (self.geometry.width // columns)

    @property
    def ring(self) -> int:
        """Pieces that a block holds."""
        g = self.geometry
        piece, others = TILE * self.widths[0] * 2, g.heads * (g.width + TILE) * 2
        return min((_MOST_BYTES - others) // piece, _MOST_PLACES)
