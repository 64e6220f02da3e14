"""A block of the decode kernel for one row: its queries, its share of the row's keys, and the row's output.

Scores are computed transposed, keys x queries: wgmma needs 64 rows on its left side, which a tile of keys fills and a
group of queries would not.

The keys of a row may be divided among several blocks (flash-decoding split-K, Dao et al., 2023). The blocks of a
cluster combine their shares through distributed shared memory, so this needs no second kernel. The row may go on from
keys that `mosaic_shared.py` has read for several rows at once.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `acc` the unnormalised output,
each with one column per fetched query.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import PER_COLUMN, WGMMA, multiply, over_rows
from pallas_kernels.mosaic.turned import load_turned
from pallas_kernels.paged_attention.mosaic_block import Block, tiles_of_part
from pallas_kernels.paged_attention.mosaic_schedule import TILE, Geometry, Schedule
from pallas_kernels.paged_attention.mosaic_shared import SharedGeometry
from pallas_kernels.shared_keys import ROWS_PER_TILE


class RowBlock(Block):
    """One block: a row, a key head, and a share of the row's keys.

    Args:
        geometry: sizes of heads and pages.
        options: scale, window and soft cap.
        schedule: clusters, parts and stages.
        refs: the arrays and the scratch memory by name.
        interpret: whether Pallas's interpreter runs the kernel on the CPU.
    """

    def __init__(
        self,
        geometry: Geometry,
        options: ScoreOptions,
        schedule: Schedule,
        refs: Mapping[str, Ref],
        *,
        interpret: bool,
    ) -> None:
        self.interpret = interpret
        row = lax.axis_index("row")
        super().__init__(geometry, options, schedule, refs, row=row, stop_key=refs["seq_lens"][row])
        # With 8-bit pages `q_tile` is free once the queries are converted, and holds the output.
        self.out_tile = refs["out_tile" if "out_tile" in refs else "q_tile"]
        self.part = lax.axis_index("part")
        self.rank = lax.axis_index("share") if schedule.cluster > 1 else jnp.int32(0)
        share, shares = self.part * schedule.cluster + self.rank, schedule.parts * schedule.cluster
        self.is_first = share == 0
        first = self.start_key // TILE
        if "places" in refs:
            places = refs["shared_lens"].shape[0] * ROWS_PER_TILE
            self.place = jnp.minimum(refs["places"][row], places - 1)
            shared = refs["shared_lens"][self.place // ROWS_PER_TILE]
            is_in_tile = refs["places"][row] < places
            self.shared_tiles = jnp.where(is_in_tile, shared, 0) // TILE
            # A row without a query has no keys.
            self.shared_tiles = jnp.minimum(self.shared_tiles, self.stop_key // TILE)
            first += self.shared_tiles
        tiles = pl.cdiv(self.stop_key, TILE) - first
        self.start = first + tiles * share // shares
        self.stop = first + tiles * (share + 1) // shares

    def begin(self) -> None:
        """Starts the copies of the queries and of the first `stages` tiles, and waits for the queries."""
        refs = self.refs
        queries = refs["q"].at[self.row, pl.ds(self.first_query, self.geometry.columns)]
        plgpu.copy_gmem_to_smem(queries, refs["q_tile"], refs["q_arrived"])
        self.fetch_first()
        plgpu.barrier_wait(refs["q_arrived"])

    def initial_state(self, sink_scale: float = 0.0) -> tuple[Array, Array, Array]:
        """Returns `m`, `total` and `acc` before the share's first tile: after shared keys, or without any key."""
        without_keys = self._state_without_keys(sink_scale)
        if "places" not in self.refs:
            return without_keys
        goes_on = self.is_first & (self.shared_tiles > 0)
        return lax.cond(goes_on, self._state_after_shared, lambda: without_keys)

    def _state_without_keys(self, sink_scale: float) -> tuple[Array, Array, Array]:
        """Returns `m`, `total` and `acc` before any key; in the first share a sink counts as a key without value.

        `total` keeps one partial sum per position of the tile, so that the sums are reduced across warps only once, at
        the end. With a sink, `m` starts at the sink plus `sink_scale`, in units of log2.
        """
        columns = self.geometry.columns
        m = plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), PER_COLUMN)
        total = plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), WGMMA)
        acc = jnp.zeros((self.geometry.head_dim, columns), jnp.float32)
        if "sinks" in self.refs:
            sinks = self.refs["sinks"].at[pl.ds(self.first_query, columns)]
            sinks = plgpu.load(sinks, layout=PER_COLUMN, optimized=False)
            m = sinks * LOG2_E + jnp.where(self.is_first, sink_scale, -jnp.inf)
            position = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=WGMMA)
            first = jnp.where(self.is_first, 2.0**-sink_scale, 0.0)
            total = jnp.where(position == 0, first, total)
        return m, total, plgpu.layout_cast(acc, WGMMA)

    def _state_after_shared(self) -> tuple[Array, Array, Array]:
        """Loads what the blocks of the shared keys have left for this row, and combines their parts."""
        columns, most_parts = self.geometry.columns, self.refs["shared_m"].shape[2]
        parts = self.refs["shared_parts"][0]
        state = self._part_of_shared(0)
        for part in range(1, most_parts):
            start, stop = tiles_of_part(self.shared_tiles, part, parts)
            has_keys = (part < parts) & (start < stop)
            joined = partial(self._join_part, part, *state)
            state = lax.cond(has_keys, joined, lambda state=state: state)
        m, total, acc = state
        position = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=WGMMA)
        return m, jnp.where(position == 0, over_rows(total, TILE), 0.0), acc

    def _join_part(
        self, part: int, m: Array, total: Array, acc: Array
    ) -> tuple[Array, Array, Array]:
        """Adds a part of the shared keys to the softmax."""
        later_m, later_total, later_acc = self._part_of_shared(part)
        top = jnp.maximum(m, later_m)
        decay, later_decay = jnp.exp2(m - top), jnp.exp2(later_m - top)
        head_dim = self.geometry.head_dim
        acc = acc * over_rows(decay, head_dim) + later_acc * over_rows(later_decay, head_dim)
        return top, total * decay + later_total * later_decay, acc

    def _part_of_shared(self, part: int) -> tuple[Array, Array, Array]:
        """Loads `m`, the sum of the weights and `acc` of a part of the shared keys."""
        refs, columns = self.refs, self.geometry.columns
        blocks = SharedGeometry.within(self.geometry)
        assert blocks is not None, "otherwise no keys are shared"
        queries = pl.ds(lax.rem(self.place, blocks.rows) * columns, columns)
        at = self.place // blocks.rows, self.kv_head, part, queries
        load = partial(plgpu.load, layout=PER_COLUMN, optimized=False)
        acc = load_turned(refs["shared_acc"].at[at], layout=WGMMA, interpret=self.interpret)
        return load(refs["shared_m"].at[at]), load(refs["shared_total"].at[at]), acc

    def is_edge(self, tile: Array) -> Array:
        """Returns whether a tile holds keys outside of the row's visible range."""
        return (tile * TILE < self.start_key) | ((tile + 1) * TILE > self.stop_key)

    def positions(self, tile: Array, shape: tuple[int, ...], layout: Layout) -> Array:
        """Returns the position in the sequence of each key of a tile, along axis 0 of `shape`."""
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * TILE

    def visible(self, tile: Array, shape: tuple[int, ...], layout: Layout = WGMMA) -> Array:
        """Returns for each key of the tile, along axis 0 of `shape`, whether the row sees it."""
        position = self.positions(tile, shape, layout)
        return (position >= self.start_key) & (position < self.stop_key)

    def update_softmax(
        self, m: Array, total: Array, scores: Array, tops: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Adds a tile's scores to the online softmax; the new maximum is over `m` and `tops`.

        Returns:
            The new `m` and `total`, the weights of the tile's keys, and the factor of `acc`.
        """
        m_next = jnp.maximum(m, jnp.max(tops, axis=0))
        decay = jnp.exp2(m - m_next)
        p = jnp.exp2(scores - over_rows(m_next, TILE))
        total = total * over_rows(decay, TILE) + p
        return m_next, total, p, over_rows(decay, self.geometry.head_dim)

    def multiply_values(self, values: Ref, p: Array, *, meanwhile: Callable[[], None]) -> Array:
        """Returns the product of the tile's values with their weights; `meanwhile` runs while wgmma does."""
        weights = self.refs["p_tile"].transpose((1, 0))
        assign(weights, ..., p.astype(self.geometry.operand))
        plgpu.commit_smem()
        return multiply(values.transpose((1, 0)), weights, meanwhile=meanwhile)

    def end(self, m: Array, total: Array, acc: Array) -> None:
        """Normalises the share's result and writes it, or sends it to the cluster's first block."""
        out, lse = self.normalise(m, total, acc)
        if self.schedule.cluster == 1:
            self.write(out, lse)
        else:
            self.join_shares(out, lse)

    def normalise(self, m: Array, total: Array, acc: Array) -> tuple[Array, Array]:
        """Returns the share's output and base-2 log-sum-exp, zeros and -inf for a share without keys."""
        total = jnp.sum(total, axis=0)
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        lse = m + jnp.log2(total) + jnp.where(self.stop_key > 0, 0.0, -jnp.inf)
        return acc * over_rows(inverse, self.geometry.head_dim), lse

    def join_shares(self, out: Array, lse: Array) -> None:
        """Sends the share to the cluster's first block, which combines all shares and writes the row's result."""
        refs = self.refs
        for name, value in (("out", out), ("lse", over_rows(lse, TILE))):
            plgpu.async_store_smem(
                value,
                refs[f"{name}_shares"].at[self.rank],
                refs["shares_arrived"],
                cluster_idx=jnp.int32(0),
                cluster_dim="share",
                optimized=False,
            )

        pl.when(self.rank == 0)(self.write_joined)

    def write_joined(self) -> None:
        """Waits for the cluster's shares, combines them by their log-sum-exps and writes the row's result."""
        refs, cluster = self.refs, range(self.schedule.cluster)
        plgpu.barrier_wait(refs["shares_arrived"])
        load = partial(plgpu.load, layout=WGMMA, optimized=False)
        lses = [load(refs["lse_shares"].at[share]) for share in cluster]
        top = reduce(jnp.maximum, lses)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = [jnp.exp2(lse - top) for lse in lses]
        total = sum(weights[1:], weights[0])
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        repeats = self.geometry.head_dim // TILE
        outs = [
            load(refs["out_shares"].at[share]) * lax.concatenate([weight * inverse] * repeats, 0)
            for share, weight in zip(cluster, weights, strict=True)
        ]
        self.write(sum(outs[1:], outs[0]), jnp.max(top + jnp.log2(total), axis=0))

    def write(self, out: Array, lse: Array) -> None:
        """Stores the result: the group's heads, or with several parts all columns in float32 for XLA to combine."""
        refs, group = self.refs, self.geometry.group
        if "lse" in refs:
            assign(refs["lse"], (self.row, self.part, self.kv_head), lse)
        if self.schedule.parts > 1:
            assign(refs["out"], (self.row, self.part, self.kv_head), out)
            return
        assign(self.out_tile.transpose((1, 0)), ..., out.astype(self.geometry.dtype))
        plgpu.commit_smem()
        head = self.kv_head * group
        queries = self.out_tile.at[pl.ds(head - self.first_query, group)]
        plgpu.copy_smem_to_gmem(queries, refs["out"].at[self.row, pl.ds(head, group)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
