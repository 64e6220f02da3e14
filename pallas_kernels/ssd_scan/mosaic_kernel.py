"""What one build of the kernel of `ssd_scan` is made for: its sizes and its schedule."""

from dataclasses import dataclass

from pallas_kernels.ssd_scan.mosaic_schedule import Geometry, Schedule


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and schedule."""

    geometry: Geometry
    schedule: Schedule
    has_snapshots: bool
    interpret: bool
