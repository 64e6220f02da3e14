"""Static parameters of one build of the `ssd_scan` kernel."""

from dataclasses import dataclass

from pallas_kernels.ssd_scan.mosaic_schedule import Geometry, Schedule


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and schedule.

    Attributes:
        geometry: sizes of the layer.
        schedule: consumers and stages.
        has_snapshots: whether snapshots are an input.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
    """

    geometry: Geometry
    schedule: Schedule
    has_snapshots: bool
    interpret: bool
