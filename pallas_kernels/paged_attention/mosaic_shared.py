"""The keys with which several rows begin: a kernel that runs before the decode kernel of `paged_attention`.

A block has a tile of rows, so that a shared key is read once for all of them. It leaves the state of each row's softmax
in global memory, and the row's own block goes on from there. Scores are queries x keys here: the queries of several
rows fill the 64 rows of a wgmma, and the weights stay in registers, as in `ragged_attention`.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `p` the weights of the latest
tile of keys. Each has one row per query. `scores` and `acc` are the accumulators of the two products.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.device import (
    NUM_MULTIPROCESSORS,
    RESERVED_BYTES_PER_BLOCK,
    ROW_TILE,
    SHARED_BYTES,
    WGMMA_ROWS,
)
from pallas_kernels.mosaic.accumulators import add_product, wait_for_products
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, column_groups, over_columns, swizzled
from pallas_kernels.paged_attention.mosaic_block import Block, tiles_of_part
from pallas_kernels.paged_attention.mosaic_schedule import OTHER_BYTES, TILE, Geometry, Schedule
from pallas_kernels.shared_keys import ROWS_PER_TILE

# Largest head_dim whose queries are kept in registers.
_QUERIES_IN_REGISTERS = 128
# Most blocks that divide a tile's keys; a row loads the state of each.
_MOST_PARTS = 8
# Most blocks of a launch whose keys are divided, if all places had rows. Each leaves 33 KB for heads of 128.
_MOST_BLOCKS = 1024


@dataclass(frozen=True)
class SharedGeometry(Geometry):
    """Sizes of a block of several rows.

    Attributes:
        rows: rows of a block, a power of two.
    """

    rows: int = 1

    @classmethod
    def within(cls, geometry: Geometry) -> "SharedGeometry | None":
        """Returns the sizes for as many rows as one wgmma has; `None` if it has a single one, or for 8 bits."""
        rows = ROWS_PER_TILE
        while rows * geometry.columns > WGMMA_ROWS:
            rows //= 2
        if rows < 2 or geometry.stored is not None:
            return None
        sizes = {field.name: getattr(geometry, field.name) for field in fields(geometry)}
        return cls(**sizes, rows=rows)


class SharedBlock(Block):
    """One block: some rows of a tile of rows, a key head, and a part of the keys that the tile shares.

    Args:
        kernel: the kernel.
        refs: the arrays and the scratch memory by name.
    """

    def __init__(self, kernel: "SharedKernel", refs: Mapping[str, Ref]) -> None:
        self.kernel, geometry = kernel, kernel.geometry
        self.block = lax.axis_index("block")
        places = refs["rows"].at[pl.ds(self.block * geometry.rows, geometry.rows)]
        last = refs["q"].shape[0] - 1
        self.has_rows = places[0] <= last
        # Places without a row get any row.
        self.rows = [jnp.clip(places[place], 0, last) for place in range(geometry.rows)]
        stop_key = refs["shared_lens"][self.block * geometry.rows // ROWS_PER_TILE]
        schedule = Schedule(1, 1, kernel.schedule.stages)
        super().__init__(
            geometry, kernel.options, schedule, refs, row=self.rows[0], stop_key=stop_key
        )
        self.part, tiles = lax.axis_index("part"), stop_key // TILE
        self.start, stop = tiles_of_part(tiles, self.part, refs["shared_parts"][0])
        self.stop = jnp.where(self.part < refs["shared_parts"][0], stop, self.start)
        self.multiply = partial(add_product, interpret=kernel.interpret)
        self.result = partial(wait_for_products, interpret=kernel.interpret)

    def run(self) -> None:
        """Computes the rows' softmax over the shared keys and writes its state."""
        refs, columns = self.refs, self.geometry.columns
        for place, row in enumerate(self.rows):
            plgpu.copy_gmem_to_smem(
                refs["q"].at[row, pl.ds(self.first_query, columns)],
                refs["q_tile"].at[pl.ds(place * columns, columns)],
                refs["q_arrived"],
            )
        self.fetch_first()
        plgpu.barrier_wait(refs["q_arrived"])
        if self.kernel.interpret:
            self.attend(refs["scores"], refs["acc"])
            return
        widths = TILE, self.geometry.head_dim
        accumulators = [plgpu.ACC((WGMMA_ROWS, width), jnp.float32) for width in widths]
        pl.run_scoped(self.attend, *accumulators)

    def attend(self, scores: Ref, acc: Ref) -> None:
        """Processes all tiles, with these two accumulators, and writes the state of the softmax."""
        refs = self.refs
        queries = refs["q_tile"]
        if self.geometry.head_dim <= _QUERIES_IN_REGISTERS:
            queries = plgpu.load(queries, layout=WGMMA)
        if self.kernel.interpret:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        visit = partial(self.visit_tile, queries=queries, scores=scores, acc=acc)
        state = visit(self.start, None)
        m, total, p, _ = lax.fori_loop(self.start + 1, self.stop, visit, state)
        slot = self.slot(self.stop - 1)
        plgpu.barrier_wait(refs["v_arrived"].at[slot])
        self.multiply(acc, p, refs["v_tiles"].at[slot])
        at = self.block, self.kv_head, self.part
        assign(refs["shared_m"], at, m)
        assign(refs["shared_total"], at, jnp.sum(total, axis=1))
        assign(refs["shared_acc"], at, self.result(acc, 0))

    def visit_tile(
        self,
        tile: Array,
        state: tuple[Any, ...] | None,
        *,
        queries: Any,  # noqa: ANN401 - a ref or an array
        scores: Ref,
        acc: Ref,
    ) -> tuple[Any, ...]:
        """Adds one tile of keys to the softmax, and the values of the previous tile to `acc`.

        Page ids for the refill are loaded at the top, long before their use, and values are refilled a tile later.
        """
        refs, stages = self.refs, self.schedule.stages
        slot, before, later = self.slot(tile), self.slot(tile - 1), tile + stages
        pages = self.pages(later)
        scores[...] = plgpu.layout_cast(jnp.zeros(scores.shape, jnp.float32), WGMMA)
        plgpu.barrier_wait(refs["k_arrived"].at[slot])
        self.multiply(scores, queries, refs["k_tiles"].at[slot], transposed=True)
        if state is not None:
            plgpu.barrier_wait(refs["v_arrived"].at[before])
            self.multiply(acc, state[2], refs["v_tiles"].at[before])
        raw = self.result(scores, 0 if state is None else 1)
        self._refill("k", later, slot, pages)
        old = self._without_keys() if state is None else state[:2]
        m, total, p, decay = self._softmax(self.shape_scores(raw), *old)
        if state is not None:
            done = self.result(acc, 0)
            self._refill("v", later - 1, before, state[3])
            acc[...] = done * over_columns(decay, self.geometry.head_dim)
        return m, total, p.astype(self.geometry.dtype), pages

    def _refill(self, pool: str, tile: Array, slot: Array, pages: tuple[Array, ...]) -> None:
        """Starts the copy of a tile into a stage that has been read."""
        plgpu.commit_smem()
        pl.when(tile < self.stop)(partial(self.fetch, pool, tile, slot, pages))

    def _without_keys(self) -> tuple[Array, Array]:
        """Returns `m` and `total` before the first tile; before a row's first, a sink counts as a key without value."""
        shape = (WGMMA_ROWS, ROW_TILE)
        if "sinks" not in self.refs:
            m = jnp.full(WGMMA_ROWS, -jnp.inf, jnp.float32)
            total = jnp.zeros(shape, jnp.float32)
            return plgpu.layout_cast(m, PER_ROW), plgpu.layout_cast(total, WGMMA)
        sinks = plgpu.load(self.refs["sinks"].at[self.kv_head], layout=PER_ROW, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        is_first = self.start == 0
        m = sinks * LOG2_E + jnp.where(is_first, 0.0, -jnp.inf)
        return m, jnp.where(column == 0, jnp.where(is_first, 1.0, 0.0), 0.0)

    def _softmax(self, scores: Array, m: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the new `m` and `total`, the tile's weights, and the factor of `acc`.

        `total` has 8 columns of partial sums, so that lanes are reduced only once, at the end.
        """
        m_next = jnp.maximum(m, jnp.max(scores, axis=1))
        decay = jnp.exp2(m - m_next)
        p = jnp.exp2(scores - over_columns(m_next, TILE))
        of_tile = reduce(jnp.add, column_groups(p))
        return m_next, total * over_columns(decay, ROW_TILE) + of_tile, p, decay


@dataclass(frozen=True)
class SharedSchedule:
    """The division of a launch.

    Attributes:
        most_parts: most blocks that divide the keys of a tile. How many do is data: see `parts_of`.
        stages: tiles of keys and of values in flight per block; two if a multiprocessor would not hold two blocks with
            three.
    """

    most_parts: int
    stages: int

    @classmethod
    def of(cls, geometry: SharedGeometry, places: int) -> "SharedSchedule":
        """Returns the schedule for so many places."""
        slots = places // geometry.rows * geometry.kv_heads
        tile = TILE * geometry.head_dim * jnp.dtype(geometry.dtype).itemsize
        three = 2 * 3 * tile + tile + OTHER_BYTES
        fits_twice = 2 * (three + RESERVED_BYTES_PER_BLOCK) <= SHARED_BYTES
        most_parts = min(_MOST_PARTS, _MOST_BLOCKS // max(slots, 1))
        return cls(max(most_parts, 1), 3 if fits_twice else 2)

    def parts_of(self, geometry: SharedGeometry, lens: Int[Array, " tiles"]) -> Int[Array, "1"]:
        """Returns how many blocks divide the keys of a tile: about two blocks per multiprocessor in all."""
        per_tile = ROWS_PER_TILE // geometry.rows * geometry.kv_heads
        blocks = per_tile * jnp.sum(lens > 0, dtype=jnp.int32, keepdims=True)
        return jnp.clip(2 * NUM_MULTIPROCESSORS // jnp.maximum(blocks, 1), 1, self.most_parts)


@dataclass(frozen=True)
class SharedKernel:
    """The kernel for one geometry, one set of options and one number of places.

    Attributes:
        geometry: sizes of heads, pages and blocks.
        options: scale and soft cap; no window.
        places: places of `SharedKeys`.
        has_sinks: whether sinks are an input.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
    """

    geometry: SharedGeometry
    options: ScoreOptions
    places: int
    has_sinks: bool
    interpret: bool = False

    @cached_property
    def schedule(self) -> SharedSchedule:
        """The division of the launch."""
        return SharedSchedule.of(self.geometry, self.places)

    def build(self) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel.

        It takes q, the pools of keys and values, the page table, `SharedKeys.rows` and `lens`, the number of parts, and
        sinks [kv_heads, 64] if there are any. It returns `m` and `total` [blocks, kv_heads, parts, 64] and `acc`
        [blocks, kv_heads, parts, 64, head_dim], in which a row has `columns` of the 64 queries; a part without keys is
        not written.
        """
        g, parts = self.geometry, self.schedule.most_parts
        blocks = self.places // g.rows
        of_queries = jax.ShapeDtypeStruct((blocks, g.kv_heads, parts, WGMMA_ROWS), jnp.float32)
        return mosaic_kernel(
            self._body,
            out_type=[
                of_queries,
                of_queries,
                jax.ShapeDtypeStruct((*of_queries.shape, g.head_dim), jnp.float32),
            ],
            scratch_types=self._scratch(),
            grid=(blocks, g.kv_heads, parts),
            grid_names=("block", "kv_head", "part"),
            # The kernel places its barriers between warps itself.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=self.interpret,
            kernel_name="shared_keys",
        )

    def _scratch(self) -> dict[str, Any]:
        g, stages = self.geometry, self.schedule.stages
        wide = swizzled(g.head_dim, g.dtype)
        tiles = plgpu.SMEM((stages, TILE, g.head_dim), g.dtype, transforms=wide)
        arrived = plgpu.Barrier(num_arrivals=g.copies_per_tile, num_barriers=stages)
        scratch = {
            "k_tiles": tiles,
            "v_tiles": tiles,
            "q_tile": plgpu.SMEM((WGMMA_ROWS, g.head_dim), g.dtype, transforms=wide),
            "q_arrived": plgpu.Barrier(num_arrivals=g.rows),
            "k_arrived": arrived,
            "v_arrived": arrived,
        }
        if self.interpret:
            scratch["scores"] = plgpu.SMEM((WGMMA_ROWS, TILE), jnp.float32)
            scratch["acc"] = plgpu.SMEM((WGMMA_ROWS, g.head_dim), jnp.float32)
        return scratch

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        names = ["q", "k_pages", "v_pages", "page_table", "rows", "shared_lens", "shared_parts"]
        names += ["sinks"] * self.has_sinks
        names += ["shared_m", "shared_total", "shared_acc"]
        block = SharedBlock(self, dict(zip(names, refs, strict=True)) | scratch)
        pl.when(block.has_rows & (block.stop > block.start))(block.run)
