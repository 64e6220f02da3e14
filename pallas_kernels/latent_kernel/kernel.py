"""Static parameters of one build of the MLA kernel: geometry, schedule, and the source (producer) of its tiles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jax import Array

from pallas_kernels.latent_kernel.schedule import SLOTS, Geometry, Schedule
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.mosaic.private_types import Ref

CONSUMERS = 2


@runtime_checkable
class Exchange(Protocol):
    """Hooks for kernels in which the blocks of one piece form a cluster and send each other tiles."""

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory and barriers of the exchange, by name."""
        ...

    def begin(self, refs: Mapping[str, Ref]) -> None:
        """Initialises the exchange; all warpgroups call it first."""
        ...

    def wait(self, refs: Mapping[str, Ref], half: str, slot: int, turn: Array) -> None:
        """Waits for the other blocks' part of a half of a tile; `turn` counts the previous uses of the stage."""
        ...

    def end(self) -> None:
        """Waits until no block accesses another block's shared memory any more."""
        ...


@dataclass(frozen=True)
class Source:
    """The producer side of the kernel: where tiles of latents come from.

    Attributes:
        arrays: names of the input arrays that the producer reads, in the order of arguments; the last one describes the
            pieces.
        producer: class of the producer warpgroup, whose `run` fetches all tiles. In a kernel without one, each consumer
            has an instance and calls `fetch_queries`, and `start`, `finish` and `drain` for its halves of tiles.
        arrivals: number of arrivals that complete the barrier of `lo`, and that of `hi` with its `rope`.
        registers: registers per thread of a consumer and of the producer. Each of the three warpgroups starts with 168;
            if twice the first plus the second exceeded 504, the block would wait forever.
        held: number of pieces of 64 query columns, the last ones, that consumers keep in registers. This reduces the
            reads of shared memory, whose bandwidth the products saturate.
        exchange: the exchange of tiles among the blocks of a piece, which then form a cluster; `None` for none.
    """

    arrays: tuple[str, ...]
    producer: Callable[..., Any]
    arrivals: tuple[int, int]
    registers: tuple[int, int]
    held: int = 0
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one scale, one schedule and one source of tiles.

    Attributes:
        geometry: sizes of heads, latents and pages.
        scale: factor of the scores.
        schedule: clusters and parts.
        pieces: number of pieces of work.
        has_lse: whether the log-sum-exp is an output.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
        source: the producer side.
        name: the kernel's name in profiles.
    """

    geometry: Geometry
    scale: float
    schedule: Schedule
    pieces: int
    has_lse: bool
    interpret: bool
    source: Source
    name: str = "latent_attention"

    @property
    def has_producer(self) -> bool:
        """Whether a third warpgroup fetches tiles; otherwise each consumer fetches the halves that it multiplies."""
        return honours_register_requests()

    @property
    def edges(self) -> int:
        """Barriers for halves with hidden rows: one per stage, but a producer has one such tile at a time."""
        return 1 if self.has_producer else SLOTS
