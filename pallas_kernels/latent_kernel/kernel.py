"""What one build of the kernel for latents is made for: its sizes, its schedule, and the source of its tiles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jax import Array

from pallas_kernels.latent_kernel.schedule import Geometry, Schedule
from pallas_kernels.mosaic.private_types import Ref

CONSUMERS = 2


@runtime_checkable
class Exchange(Protocol):
    """How the blocks of a piece's heads hand each other tiles: what a kernel does for it beside its own work."""

    def scratch(self) -> dict[str, Any]:
        """Returns the scratch buffers that it needs."""
        ...

    def begin(self, refs: Mapping[str, Ref]) -> None:
        """Gets ready, before any warpgroup of the blocks does anything else."""
        ...

    def wait(self, refs: Mapping[str, Ref], half: str, slot: int, turn: Array) -> None:
        """Waits for what other blocks send of a half of a tile; `turn` counts how often the slot has been used."""
        ...

    def end(self) -> None:
        """Waits until the blocks need nothing more of each other."""
        ...


@dataclass(frozen=True)
class Source:
    """Where tiles come from.

    Attributes:
        arrays: names of the arrays that say so, in the order of arguments; the last one tells a piece what it is.
        producer: what fetches them.
        arrivals: how often a `lo` and a `hi` with its `rope` are said to have arrived.
        registers: of each thread of consumers and producer. They start as 168 for each of three warpgroups: twice the
            first and the second may not be more than 504, or the block would wait for ever.
        held: the last columns of queries that consumers keep in registers, in 64; products read less of shared
            memory then, which gives no more than they ask for.
        exchange: makes a cluster of the blocks that share a piece's heads; `None` where they share nothing.
    """

    arrays: tuple[str, ...]
    producer: Callable[..., Any]
    arrivals: tuple[int, int]
    registers: tuple[int, int]
    held: int = 0
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one scale, one schedule and one source of tiles."""

    geometry: Geometry
    scale: float
    schedule: Schedule
    pieces: int
    has_lse: bool
    interpret: bool
    source: Source
    name: str = "latent_attention"
