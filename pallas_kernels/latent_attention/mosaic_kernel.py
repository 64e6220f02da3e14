"""The Mosaic GPU kernel of `latent_attention` for Hopper: what it is built from, and who does what in a block.

A block has three warpgroups. Two consumers (mosaic_consumer.py) share 64 rows, which are heads of a query or of a few:
each makes the scores of every other tile of keys, and each multiplies the weights of all tiles with its half of the
values' components, since 64 rows of 512 numbers do not fit into the registers of one. A producer (mosaic_producer.py)
keeps tiles in flight. Each half of a tile goes back to it as soon as the one consumer that multiplies it has done so.

Refs to whole arrays are named like the arrays; `lo` and `hi` are the halves of tiles, `rope` what is not value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.latent_attention.mosaic_consumer import Follower, Leader
from pallas_kernels.latent_attention.mosaic_pieces import Piece, Ref
from pallas_kernels.latent_attention.mosaic_producer import Producer
from pallas_kernels.latent_attention.mosaic_schedule import (
    COLUMN_TILE,
    HEIGHT,
    ROW_TILE,
    SLOTS,
    TILE,
    Geometry,
    Schedule,
)
from pallas_kernels.mosaic_rows import INTERPRETED

# What makes transforms whole classes is private to JAX.
_transform: Any = plgpu
CONSUMERS = 2
# Reductions along a row stay within four lanes and use none of it.
_REDUCTION_BYTES = 0


def swizzled(dtype: DTypeLike, columns: int = COLUMN_TILE) -> tuple[Any, ...]:
    """Returns the transforms of tiles whose rows are cut into pieces of so many numbers."""
    width = columns * jnp.dtype(dtype).itemsize
    tiling = _transform.TilingTransform((ROW_TILE, columns))
    return tiling, _transform.SwizzleTransform(width)


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

    @classmethod
    def pages(cls, geometry: Geometry) -> "Source":
        """Tiles are copied from the pages of a row."""
        copies = geometry.copies_per_tile
        what = "pieces" if geometry.packed else "seq_lens"
        arrays = ("latent_pages", "page_table", what)
        # A second one is spilled where the producer has several pages to remember.
        held = 2 if copies == 1 else 1
        return cls(arrays, Producer, (copies, 2 * copies), (232, 40), held)


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

    def build(self, tokens: int) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel."""
        return plgpu.kernel(
            self._body,
            out_type=self._out_type(tokens),
            scratch_types=self._scratch(),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            # Each place that needs a barrier between warps says so.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=_REDUCTION_BYTES,
            ),
            interpret=INTERPRETED if self.interpret else None,
            kernel_name=self.name,
            **self._grid(),
        )

    def _grid(self) -> dict[str, Any]:
        blocks, cluster = self.geometry.blocks, self.schedule.cluster
        grid = {"piece": self.pieces, "part": self.schedule.parts}
        clusters: dict[str, int] = {}
        if self.source.exchange is not None:
            assert cluster == 1, "blocks that share tiles are a cluster already"
            clusters = {"block": blocks}
        else:
            grid["block"] = blocks
            clusters = {"share": cluster} if cluster > 1 else {}
        shape = {"grid": tuple(grid.values()), "grid_names": tuple(grid)}
        if clusters:
            shape |= {"cluster": tuple(clusters.values()), "cluster_names": tuple(clusters)}
        return shape

    def _out_type(self, tokens: int) -> list[jax.ShapeDtypeStruct]:
        g, parts = self.geometry, self.schedule.parts
        places = (self.pieces, parts, g.blocks, HEIGHT)
        out_type = [jax.ShapeDtypeStruct((tokens * g.heads, g.value_dim), g.dtype)]
        if parts > 1:
            out_type = [jax.ShapeDtypeStruct((*places, g.value_dim), jnp.float32)]
        if self.has_lse:
            out_type.append(jax.ShapeDtypeStruct(places, jnp.float32))
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g = self.geometry
        wide = swizzled(g.dtype)
        half = plgpu.SMEM((SLOTS, TILE, g.half), g.dtype, transforms=wide)
        rope = plgpu.SMEM((SLOTS, TILE, g.width - g.value_dim), g.dtype, transforms=wide)
        queries = plgpu.SMEM((1, HEIGHT, g.width), g.dtype, transforms=wide)
        columns = (g.value_dim // COLUMN_TILE, HEIGHT, COLUMN_TILE)
        out = plgpu.SMEM(columns, g.dtype, transforms=wide)
        scratch = {
            "p_tile": plgpu.SMEM((1, HEIGHT, TILE), g.dtype, transforms=wide),
            # Running maxima of both consumers, and at last their sums.
            "stats": plgpu.SMEM((2 * CONSUMERS, HEIGHT), jnp.float32),
            **self._barriers(),
            **(self.source.exchange.scratch() if self.source.exchange is not None else {}),
        }
        if self.interpret:
            # The interpreter takes two places of a union for the same, and multiplies nothing that is in registers.
            return scratch | {
                "lo": half,
                "hi": half,
                "rope": rope,
                "q_tile": queries,
                "out_tile": out,
                "scores": plgpu.SMEM((CONSUMERS, HEIGHT, TILE), jnp.float32),
                "acc": plgpu.SMEM((CONSUMERS, HEIGHT, g.half), jnp.float32),
            }
        scratch["queries"] = plgpu.RefUnion(queries, out)
        if self.schedule.cluster == 1:
            return scratch | {"lo": half, "hi": half, "rope": rope}
        shares = [
            plgpu.SMEM(
                (self.schedule.cluster, HEIGHT, width),
                jnp.float32,
                transforms=swizzled(jnp.float32, piece),
            )
            for width, piece in ((g.value_dim // self.schedule.cluster, 32), (ROW_TILE, ROW_TILE))
        ]
        return scratch | {"tiles_or_shares": plgpu.RefUnion((half, half, rope), tuple(shares))}

    def _barriers(self) -> dict[str, Any]:
        s = self.schedule
        free = plgpu.Barrier(num_barriers=SLOTS)
        # The last ones are the producer's own, for values that it has yet to clear.
        arrived = [
            plgpu.Barrier(num_arrivals=count, num_barriers=SLOTS + 1)
            for count in self.source.arrivals
        ]
        barriers: dict[str, Any] = {
            "q_arrived": plgpu.Barrier(),
            "lo_arrived": arrived[0],
            "hi_arrived": arrived[1],
            "lo_free": free,
            "hi_free": free,
            "p_ready": plgpu.Barrier(num_barriers=CONSUMERS),
            "done": plgpu.Barrier(num_arrivals=CONSUMERS),
        }
        if s.cluster > 1:
            barriers["all_done"] = plgpu.ClusterBarrier(
                collective_axes=("share",), num_arrivals=CONSUMERS
            )
            barriers["shares_arrived"] = plgpu.Barrier(num_arrivals=2 * s.cluster)
        return barriers

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        names = ["q", *self.source.arrays, "out", *["lse"] * self.has_lse]
        found = dict(zip(names, refs, strict=True)) | scratch
        if not self.interpret:
            found["q_tile"], found["out_tile"] = scratch["queries"]
        if "tiles_or_shares" in scratch:
            tiles, shares = scratch["tiles_or_shares"]
            found["lo"], found["hi"], found["rope"] = tiles
            found["out_shares"], found["lse_shares"] = shares
        exchange = self.source.exchange
        if exchange is not None:
            exchange.begin(found)
        warpgroup = lax.axis_index("warpgroup")
        most, least = self.source.registers
        for number, consumer in enumerate((Leader, Follower)):

            @pl.when(warpgroup == number)
            def _(consumer: type[Leader | Follower] = consumer) -> None:
                plgpu.set_max_registers(most, action="increase")
                consumer(self, found, Piece(self, found)).run()

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            self.source.producer(self, found, Piece(self, found)).run()

        if exchange is not None:
            exchange.end()
