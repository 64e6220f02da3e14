"""One block of the Mosaic GPU decode kernel of `paged_attention` for Hopper: TMA copies, online softmax, output.

A block has one warpgroup. It computes one row, one key head and one share of the row's keys (flash-decoding split-K,
Dao et al., 2023). Scores are computed transposed, keys x queries: wgmma needs 64 rows on its left side, which a tile of
keys fills and a group of queries would not. The blocks of a cluster combine their shares through distributed shared
memory, so this needs no second kernel.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `acc` the unnormalised output,
each with one column per fetched query. Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import PER_COLUMN, WGMMA, multiply, over_rows
from pallas_kernels.paged_attention.mosaic_schedule import TILE, Geometry, Schedule


class Block:
    """One block: its indices in the grid, its range of key tiles [start, stop), and the steps of the kernel."""

    def __init__(
        self,
        geometry: Geometry,
        options: ScoreOptions,
        schedule: Schedule,
        refs: Mapping[str, Ref],
    ) -> None:
        self.geometry, self.options, self.schedule = geometry, options, schedule
        self.refs = refs
        # With 8-bit pages `q_tile` is free once the queries are converted, and holds the output.
        self.out_tile = refs["out_tile" if "out_tile" in refs else "q_tile"]
        self.row, self.kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
        self.part = lax.axis_index("part")
        self.rank = lax.axis_index("share") if self.schedule.cluster > 1 else jnp.int32(0)
        self.share = self.part * self.schedule.cluster + self.rank
        group = self.geometry.group
        self.first_query = pl.multiple_of(self.kv_head * group // ROW_TILE * ROW_TILE, ROW_TILE)
        self.stop_key = refs["seq_lens"][self.row]
        window = self.options.window
        self.start_key = jnp.int32(0) if window is None else jnp.maximum(self.stop_key - window, 0)

        tiles = pl.cdiv(self.stop_key, TILE) - self.start_key // TILE
        shares = schedule.parts * schedule.cluster
        self.start = self.start_key // TILE + tiles * self.share // shares
        self.stop = self.start_key // TILE + tiles * (self.share + 1) // shares

    def begin(self) -> None:
        """Starts the copies of the queries and of the first `stages` tiles, and waits for the queries."""
        refs = self.refs
        queries = refs["q"].at[self.row, pl.ds(self.first_query, self.geometry.columns)]
        plgpu.copy_gmem_to_smem(queries, refs["q_tile"], refs["q_arrived"])
        for slot in range(self.schedule.stages):
            tile = self.start + slot
            pl.when(tile < self.stop)(partial(self.fetch_both, tile, slot))
        plgpu.barrier_wait(refs["q_arrived"])

    def end(self, m: Array, total: Array, acc: Array) -> None:
        """Normalises the share's result and writes it, or sends it to the cluster's first block."""
        out, lse = self.normalise(m, total, acc)
        if self.schedule.cluster == 1:
            self.write(out, lse)
        else:
            self.join_shares(out, lse)

    def slot(self, tile: Array) -> Array:
        """Returns the pipeline stage that holds a tile."""
        return lax.rem(tile - self.start, jnp.int32(self.schedule.stages))

    def is_edge(self, tile: Array) -> Array:
        """Returns whether a tile holds keys outside of the row's visible range."""
        return (tile * TILE < self.start_key) | ((tile + 1) * TILE > self.stop_key)

    def fetch_both(self, tile: Array, slot: Array | int) -> None:
        """Starts the TMA copies of a tile of keys and of values."""
        pages = self.pages(tile)
        self.fetch("k", tile, slot, pages)
        self.fetch("v", tile, slot, pages)

    def pages(self, tile: Array) -> tuple[Array, ...]:
        """Returns the page ids of one tile; pages without a visible key are replaced by the nearest one with any."""
        page_size = self.geometry.page_size
        first, last = self.start_key // page_size, (self.stop_key - 1) // page_size
        entries = [tile * TILE // page_size + copy for copy in range(self.geometry.copies_per_tile)]
        return tuple(
            self.refs["page_table"][self.row, jnp.clip(entry, first, last)] for entry in entries
        )

    def fetch(self, pool: str, tile: Array, slot: Array | int, pages: tuple[Array, ...]) -> None:
        """Starts the TMA copies of one tile from the "k" or "v" pool into a stage.

        All warps must have passed a barrier since the last read of the stage.
        """
        refs, page_size = self.refs, self.geometry.page_size
        height = min(page_size, TILE)
        offset = pl.multiple_of(tile * TILE % page_size, TILE) if page_size > TILE else 0
        for copy, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                refs[f"{pool}_pages"].at[page, pl.ds(offset, height), self.kv_head],
                refs[f"{pool}_tiles"].at[slot, pl.ds(copy * height, height)],
                refs[f"{pool}_arrived"].at[slot],
            )

    def initial_state(self, sink_scale: float = 0.0) -> tuple[Array, Array, Array]:
        """Returns the initial `m`, `total` and `acc`; in the first share a sink counts as a key without value.

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
            is_first = self.share == 0
            m = sinks * LOG2_E + jnp.where(is_first, sink_scale, -jnp.inf)
            position = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=WGMMA)
            total = jnp.where(position == 0, jnp.where(is_first, 2.0**-sink_scale, 0.0), total)
        return m, total, plgpu.layout_cast(acc, WGMMA)

    def positions(self, tile: Array, shape: tuple[int, ...], layout: Layout) -> Array:
        """Returns the position in the sequence of each key of a tile, along axis 0 of `shape`."""
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + tile * TILE

    def shape_scores(self, scores: Array) -> Array:
        """Scales and caps scores, and multiplies them by log2(e) for exp2."""
        scale, cap = self.options.scale, self.options.soft_cap
        if cap is None:
            return scores * (scale * LOG2_E)
        # tanh from exp2 and a division; the hardware's `tanh.approx` errs by up to 5e-4.
        scores = 1.0 - 2.0 / (jnp.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)
        return scores * (cap * LOG2_E)

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

    def visible(self, tile: Array, shape: tuple[int, ...], layout: Layout = WGMMA) -> Array:
        """Returns for each key of the tile, along axis 0 of `shape`, whether the row sees it."""
        position = self.positions(tile, shape, layout)
        return (position >= self.start_key) & (position < self.stop_key)

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
