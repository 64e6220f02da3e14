"""The Mosaic GPU kernel of `paged_attention` for Hopper: what one block does, from its page ids to its output.

One block of one warpgroup serves one row, one key head and one share of the row's keys. Scores are computed
transposed, keys by queries: a query group is far narrower than the 64 rows that wgmma wants on its left side, and
keys fill them. The shares of a row are joined inside a cluster through shared memory, so no second kernel runs.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `acc` the output so far, all
with one column per query fetched. Refs to whole arrays are named like the arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import e, log2
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.mosaic_schedule import ROW_TILE, TILE, Geometry, Schedule

LOG2_E = log2(e)

# Refs have types that are private to JAX, and so has what makes their transforms whole classes.
Ref = Any
_transform: Any = plgpu
_SWIZZLED = (_transform.TilingTransform((ROW_TILE, 64)), _transform.SwizzleTransform(128))
_SWIZZLED_F32 = (_transform.TilingTransform((ROW_TILE, 8)), _transform.SwizzleTransform(32))
_WGMMA = plgpu.Layout.WGMMA
_PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Options:
    """What the scores become between the product with the keys and the softmax."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry, one set of options and one schedule."""

    geometry: Geometry
    options: Options
    schedule: Schedule
    has_lse: bool
    has_sinks: bool

    def build(self, rows: int, interpret: bool) -> Callable[..., list[Array]]:
        """Returns the function of arrays that launches the kernel."""
        cluster = self.schedule.cluster
        clusters = {"cluster": (cluster,), "cluster_names": ("share",)} if cluster > 1 else {}
        mode = plgpu.InterpretGPUParams(
            detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
        )
        return plgpu.kernel(
            self._body,
            out_type=self._out_type(rows),
            scratch_types=self._scratch(),
            grid=(rows, self.geometry.kv_heads, self.schedule.parts),
            grid_names=("row", "kv_head", "part"),
            # `attend` and `fetch` say which barriers take the place of those that would be added.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            interpret=mode if interpret else None,
            kernel_name="paged_attention",
            **clusters,
        )

    def _out_type(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        g, parts = self.geometry, self.schedule.parts
        out_type = [jax.ShapeDtypeStruct((rows, g.heads, g.head_dim), g.dtype)]
        if parts > 1:
            shape = (rows, parts, g.kv_heads, g.head_dim, g.columns)
            out_type = [jax.ShapeDtypeStruct(shape, jnp.float32)]
        if self.has_lse:
            shape = (rows, parts, g.kv_heads, g.columns)
            out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g, stages, cluster = self.geometry, self.schedule.stages, self.schedule.cluster
        tiles = plgpu.SMEM((stages, TILE, g.head_dim), g.dtype, transforms=_SWIZZLED)
        arrived = plgpu.Barrier(num_arrivals=g.copies_per_tile, num_barriers=stages)
        scratch = {
            "q_tile": plgpu.SMEM((g.columns, g.head_dim), g.dtype, transforms=_SWIZZLED),
            "k_tiles": tiles,
            "v_tiles": tiles,
            "p_tile": plgpu.SMEM((g.columns, TILE), g.dtype, transforms=_SWIZZLED),
            "out_tile": plgpu.SMEM((g.columns, g.head_dim), g.dtype),
            "q_arrived": plgpu.Barrier(),
            "k_arrived": arrived,
            "v_arrived": arrived,
        }
        if cluster > 1:
            for name, height in (("out_shares", g.head_dim), ("lse_shares", TILE)):
                shape = (cluster, height, g.columns)
                scratch[name] = plgpu.SMEM(shape, jnp.float32, transforms=_SWIZZLED_F32)
            scratch["shares_arrived"] = plgpu.Barrier(num_arrivals=2 * cluster)
        return scratch

    def _body(self, *refs: Ref, **scratch: Ref) -> None:
        inputs, outputs = refs[: 5 + self.has_sinks], refs[5 + self.has_sinks :]
        names = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "sinks")
        outputs = dict(zip(("out", "lse"), outputs, strict=False))
        _Block(self, dict(zip(names, inputs, strict=False)) | outputs | scratch).run()


class _Block:
    """One block at work: its place in the grid, its share of the row's keys, and what it does with them."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        self.geometry, self.options, self.schedule = (
            kernel.geometry,
            kernel.options,
            kernel.schedule,
        )
        self.refs = refs
        self.row, self.kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
        self.part = lax.axis_index("part")
        self.rank = lax.axis_index("share") if self.schedule.cluster > 1 else jnp.int32(0)
        self.share = self.part * self.schedule.cluster + self.rank
        group = self.geometry.group
        self.first_query = pl.multiple_of(self.kv_head * group // ROW_TILE * ROW_TILE, ROW_TILE)
        self.stop_key = refs["seq_lens"][self.row]
        window = self.options.window
        self.start_key = jnp.int32(0) if window is None else jnp.maximum(self.stop_key - window, 0)

    def run(self) -> None:
        """Attends to this block's share of the keys and delivers the result."""
        refs, stages = self.refs, self.schedule.stages
        queries = refs["q"].at[self.row, pl.ds(self.first_query, self.geometry.columns)]
        plgpu.copy_gmem_to_smem(queries, refs["q_tile"], refs["q_arrived"])
        first = self.start_key // TILE
        count = pl.cdiv(self.stop_key, TILE) - first
        shares = self.schedule.parts * self.schedule.cluster
        start = first + count * self.share // shares
        stop = first + count * (self.share + 1) // shares
        for slot in range(stages):
            pl.when(start + slot < stop)(partial(self.fetch_both, start + slot, slot))
        plgpu.barrier_wait(refs["q_arrived"])
        state = (*self.initial_state(), (jnp.int32(0),) * self.geometry.copies_per_tile)
        attend = partial(self.attend, start=start, stop=stop)
        *state, _ = lax.fori_loop(start, stop, attend, state)
        out, lse = self.normalise(*state)
        if self.schedule.cluster == 1:
            self.write(out, lse)
        else:
            self.join_shares(out, lse)

    def fetch_both(self, tile: Array, slot: int) -> None:
        """Starts the copies of a tile of keys and of values."""
        pages = self.pages(tile)
        self.fetch("k", tile, slot, pages)
        self.fetch("v", tile, slot, pages)

    def pages(self, tile: Array) -> tuple[Array, ...]:
        """Returns the ids of one tile's pages; in the place of one that holds no key to see stands one that does."""
        page_size = self.geometry.page_size
        first, last = self.start_key // page_size, (self.stop_key - 1) // page_size
        entries = [tile * TILE // page_size + copy for copy in range(self.geometry.copies_per_tile)]
        return tuple(
            self.refs["page_table"][self.row, jnp.clip(entry, first, last)] for entry in entries
        )

    def fetch(self, pool: str, tile: Array, slot: Array | int, pages: tuple[Array, ...]) -> None:
        """Starts the copies of one tile from the "k" or "v" pool.

        Every warp must have passed a barrier since the slot was last read.
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

    def initial_state(self) -> tuple[Array, Array, Array]:
        """Returns `m`, `total` and `acc` before any key; the first share counts the sinks as a key without value.

        `total` keeps one sum per position in the tile, so that only its last sum crosses warps.
        """
        columns = self.geometry.columns
        m = plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), _PER_COLUMN)
        total = plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), _WGMMA)
        acc = jnp.zeros((self.geometry.head_dim, columns), jnp.float32)
        if "sinks" in self.refs:
            sinks = self.refs["sinks"].at[pl.ds(self.first_query, columns)]
            sinks = plgpu.load(sinks, layout=_PER_COLUMN, optimized=False)
            m = sinks * LOG2_E + jnp.where(self.share == 0, 0.0, -jnp.inf)
            position = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=_WGMMA)
            total = jnp.where(position == 0, jnp.where(self.share == 0, 1.0, 0.0), total)
        return m, total, plgpu.layout_cast(acc, _WGMMA)

    def attend(
        self, tile: Array, state: tuple[Any, ...], *, start: Array, stop: Array
    ) -> tuple[Any, ...]:
        """Takes one tile of keys and values into the softmax.

        Copies into the slots that it frees start while a product runs, from page ids read long before: for keys
        at once, behind the maximum, which crosses warps; for values in the next call, behind a barrier of its own.
        """
        refs, stages = self.refs, self.schedule.stages
        m, total, acc, pages_before = state
        later = tile + stages
        pages = self.pages(later)
        slot = lax.rem(tile - start, jnp.int32(stages))
        at_edge = (tile * TILE < self.start_key) | ((tile + 1) * TILE > self.stop_key)

        def refill_values() -> None:
            @pl.when((tile > start) & (later - 1 < stop))
            def _() -> None:
                plgpu.commit_smem()
                freed = lax.rem(later - 1 - start, jnp.int32(stages))
                self.fetch("v", later - 1, freed, pages_before)

        def refill_keys() -> None:
            pl.when(later < stop)(partial(self.fetch, "k", later, slot, pages))

        plgpu.barrier_wait(refs["k_arrived"].at[slot])
        queries = refs["q_tile"].transpose((1, 0))
        scores = _multiply(refs["k_tiles"].at[slot], queries, meanwhile=refill_values)
        scores = self.shape_scores(scores, tile, at_edge)
        m_next = jnp.maximum(m, jnp.max(scores, axis=0))
        decay = jnp.exp2(m - m_next)
        p = jnp.exp2(scores - _over_rows(m_next, TILE))
        plgpu.barrier_wait(refs["v_arrived"].at[slot])
        pl.when(at_edge)(partial(self.clear_hidden_values, tile, slot))
        weights = refs["p_tile"].transpose((1, 0))
        weights[...] = p.astype(self.geometry.dtype)
        plgpu.commit_smem()
        values = refs["v_tiles"].at[slot].transpose((1, 0))
        update = _multiply(values, weights, meanwhile=refill_keys)
        total = total * _over_rows(decay, TILE) + p
        return m_next, total, acc * _over_rows(decay, self.geometry.head_dim) + update, pages

    def shape_scores(self, scores: Array, tile: Array, at_edge: Array) -> Array:
        """Scales and caps scores, in units of log2(e); -inf where the row does not see the key."""
        scale, cap = self.options.scale, self.options.soft_cap
        if cap is None:
            scores *= scale * LOG2_E
        else:
            # The hardware's approximate tanh is wrong by up to 5e-4; this is as exact as its exp2 and division.
            scores = 1.0 - 2.0 / (jnp.exp2(scores * (2.0 * LOG2_E * scale / cap)) + 1.0)
            scores *= cap * LOG2_E

        def hide() -> Array:
            return jnp.where(self.visible(tile, scores.shape), scores, -jnp.inf)

        return lax.cond(at_edge, hide, lambda: scores)

    def visible(self, tile: Array, shape: tuple[int, ...]) -> Array:
        """Returns, for each row of the tile, whether the row of the call sees that key."""
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + tile * TILE
        return (position >= self.start_key) & (position < self.stop_key)

    def clear_hidden_values(self, tile: Array, slot: Array) -> None:
        """Zeroes values that the row must not see: a weight of zero does not silence a NaN."""
        values = self.refs["v_tiles"].at[slot]
        loaded = plgpu.load(values, layout=_WGMMA)
        visible = self.visible(tile, loaded.shape)
        values[...] = jnp.where(visible, loaded, jnp.zeros_like(loaded))

    def normalise(self, m: Array, total: Array, acc: Array) -> tuple[Array, Array]:
        """Returns the share's output and base-2 log-sum-exp, zeros and -inf for a share without keys."""
        total = jnp.sum(total, axis=0)
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        lse = m + jnp.log2(total) + jnp.where(self.stop_key > 0, 0.0, -jnp.inf)
        return acc * _over_rows(inverse, self.geometry.head_dim), lse

    def join_shares(self, out: Array, lse: Array) -> None:
        """Sends the share to the first block of the cluster, which weighs all of them and writes the row's result."""
        refs = self.refs
        for name, value in (("out", out), ("lse", _over_rows(lse, TILE))):
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
        """Weighs the cluster's shares and writes the row's result."""
        refs, cluster = self.refs, range(self.schedule.cluster)
        plgpu.barrier_wait(refs["shares_arrived"])
        load = partial(plgpu.load, layout=_WGMMA, optimized=False)
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
        """Stores the group's queries, or all columns as they are if XLA joins them with other parts."""
        refs, group = self.refs, self.geometry.group
        if "lse" in refs:
            refs["lse"][self.row, self.part, self.kv_head] = lse
        if self.schedule.parts > 1:
            refs["out"][self.row, self.part, self.kv_head] = out
            return
        refs["out_tile"].transpose((1, 0))[...] = out.astype(self.geometry.dtype)
        plgpu.commit_smem()
        head = self.kv_head * group
        queries = refs["out_tile"].at[pl.ds(head - self.first_query, group)]
        plgpu.copy_smem_to_gmem(queries, refs["out"].at[self.row, pl.ds(head, group)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _over_rows(vector: Array, rows: int) -> Array:
    """Repeats one value per column over `rows` rows."""
    return lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])


def _multiply(left: Ref, right: Ref, *, meanwhile: Callable[[], None]) -> Array:
    """Returns the product of two tiles in shared memory, in float32; `meanwhile` runs while it is computed."""

    def product(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, left, right)
        meanwhile()
        return accumulator[...]

    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
